"""What the files of a weight store say of themselves: a manifest in each version, and the line of all of them.

    v00000012/manifest.json    of a version: its tensors and files
    head.json                  the line: which version lives, and what there is to get to it

Invariants: a file's name says what it is: `delta*` turns the version `delta_of` into this one, all other files are the
version itself, whole (or an adapter). Both kinds may be there. Whatever a reader does not find in the line it must not
ask for; what it finds may have been removed since, and then it looks at the line again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from rillflow.errors import CorruptData
from rillflow.types import Probe
from rillflow.weights.sealed import FileFacts, Manifest

DELTA = "delta"
HEAD = "head.json"

Fingerprint = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


FOLDER_NAME = re.compile(r"v(\d{8,})")


def folder_name(version: int) -> str:
    return f"v{version:08d}"


class TensorFacts(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]


class AdapterFacts(msgspec.Struct, frozen=True):
    """What a manifest says of an adapter: `base` is the version whose weights it belongs to."""

    rank: int
    alpha: float
    base: int


class VersionManifest(Manifest, frozen=True, kw_only=True):
    """`aliases` names tensors that are the same as another one (tied weights) and are stored once. With `adapter` the
    tensors are an adapter's. `fingerprints` (16 hexadecimal digits, `weights.fingerprint`) are of the tensors, however
    one comes by them. `probe` is what an engine must reproduce before it serves the version. `signature` is made with
    the run's key, of everything else in the manifest."""

    version: int
    parent: int | None
    created: float
    tensors: dict[str, TensorFacts]
    aliases: dict[str, str]
    adapter: AdapterFacts | None = None
    delta_of: int | None = None
    fingerprints: dict[str, Fingerprint] = msgspec.field(default_factory=dict)
    probe: Probe | None = None
    signature: str = ""

    @property
    def delta_files(self) -> Mapping[str, FileFacts]:
        return {name: facts for name, facts in self.files.items() if name.startswith(DELTA)}

    @property
    def full_files(self) -> Mapping[str, FileFacts]:
        """Of the whole version, or of the adapter that it is."""
        return {name: facts for name, facts in self.files.items() if not name.startswith(DELTA)}

    @property
    def entry(self) -> Entry:
        return Entry(
            delta_of=self.delta_of,
            delta_bytes=sum(facts.size for facts in self.delta_files.values()),
            full_bytes=sum(facts.size for facts in self.full_files.values()),
        )

    def tensor_fingerprints(self) -> dict[str, int]:
        """As numbers; versions of a run without deltas have none. CorruptData when one is no number."""
        try:
            return {name: int(text, 16) for name, text in self.fingerprints.items()}
        except ValueError as error:
            raise CorruptData(
                f"a fingerprint of version {self.version} is no number", "the manifest was changed"
            ) from error


def as_hexadecimal(fingerprints: Mapping[str, int]) -> dict[str, str]:
    """As manifests have them."""
    return {name: f"{value:016x}" for name, value in fingerprints.items()}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What the line says of a version: bytes of its two kinds of files (0: it has none) and the delta's base."""

    delta_of: int | None = None
    delta_bytes: int = 0
    full_bytes: int = 0


class Line(msgspec.Struct, frozen=True):
    """The live head, the versions that are no ancestors of anything that lives, and what can be pulled."""

    head: int | None
    orphaned: frozenset[int]
    entries: dict[int, Entry] = msgspec.field(default_factory=dict)
    signature: str = ""


EMPTY = Line(head=None, orphaned=frozenset())  # of a policy that has published nothing
