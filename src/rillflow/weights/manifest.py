"""The metadata of a weight store, its signatures, the routes from version to version, and the protocol of the sources.

    v00000012/manifest.json    a version's tensors and files
    head.json                  the line: the live version, and the files that lead to it

Files named `delta*` turn the version `delta_of` into this one. All other files are the whole version, or an adapter. A
version may have both kinds. A reader asks only for versions that the line lists; if one has been removed since, the
reader looks at the line again.

Signatures are HMAC-SHA256 of canonical JSON, with a key derived from the node's token. With the key a reader can verify
that this run's trainer published a version, whatever carried the files: the manifest is signed and holds the hashes of
all files. Without a key only hashes are checked. Not protected against: holders of that token; a carrier that shows an
outdated line, or the versions of another policy of the same run.

A route starts from the version that a reader holds, or from a whole version, and applies deltas. A version has at most
one delta, so one chain of deltas ends at it, and a route begins somewhere on this chain. Invariant: if a version stays
in the store, everything that it is built from stays: the whole version at the start of its chain, every delta since
then, and the base of an adapter.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from rillflow.errors import CorruptData, WeightsError
from rillflow.types import Probe
from rillflow.types.base import json_decoder
from rillflow.weights.sealed import FILE_NAME, FileFacts, Manifest

DELTA = "delta"
HEAD = "head.json"

Fingerprint = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


FOLDER_NAME = re.compile(r"v(\d{8,})")
Mode = Literal["auto", "full", "delta"]


def folder_name(version: int) -> str:
    return f"v{version:08d}"


class TensorFacts(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]


class AdapterFacts(msgspec.Struct, frozen=True):
    """An adapter's facts in a manifest; `base` is the version that it changes."""

    rank: int
    alpha: float
    base: int


class VersionManifest(Manifest, frozen=True, kw_only=True):
    """The manifest of a version.

    `aliases` names tensors that equal another one (tied weights) and are stored once. With `adapter` the tensors are
    those of an adapter. `fingerprints` (16 hexadecimal digits, `weights.fingerprint`) identify the tensors, however a
    reader got them. An engine must reproduce `probe` before it serves the version. `signature` covers everything else
    in the manifest, with the run's key.
    """

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
        """Return the files of the whole version, or of the adapter."""
        return {name: facts for name, facts in self.files.items() if not name.startswith(DELTA)}

    @property
    def entry(self) -> Entry:
        return Entry(
            delta_of=self.delta_of,
            delta_bytes=sum(facts.size for facts in self.delta_files.values()),
            full_bytes=sum(facts.size for facts in self.full_files.values()),
        )

    def tensor_fingerprints(self) -> dict[str, int]:
        """Return fingerprints as numbers; versions of a run without deltas have none. CorruptData if one is invalid."""
        try:
            return {name: int(text, 16) for name, text in self.fingerprints.items()}
        except ValueError as error:
            raise CorruptData(
                f"a fingerprint of version {self.version} is not a number", "the manifest was changed"
            ) from error


def as_hexadecimal(fingerprints: Mapping[str, int]) -> dict[str, str]:
    """Return fingerprints in the manifests' form."""
    return {name: f"{value:016x}" for name, value in fingerprints.items()}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The line's entry of a version: bytes of its two kinds of files (0: none) and the delta's base."""

    delta_of: int | None = None
    delta_bytes: int = 0
    full_bytes: int = 0


class Line(msgspec.Struct, frozen=True):
    """The live head, the orphaned versions, and the versions that can be pulled."""

    head: int | None
    orphaned: frozenset[int]
    entries: dict[int, Entry] = msgspec.field(default_factory=dict)
    signature: str = ""


EMPTY = Line(head=None, orphaned=frozenset())  # the line of a policy that has published nothing


# ---------------------------------------------------------------- signatures


S = TypeVar("S", Line, VersionManifest)

_PURPOSE = b"rillflow weights"


def key_of(node_token: str) -> bytes:
    """Derive the key from a run's node token; an empty key without a token."""
    return hmac.digest(node_token.encode(), _PURPOSE, "sha256") if node_token else b""


def signed(value: S, key: bytes) -> S:
    """Return the value with a signature of all its other fields, or with an empty one without a key."""
    return msgspec.structs.replace(value, signature=_signature(value, key) if key else "")


def check_signature(value: S, key: bytes, what: str) -> None:
    """Raise CorruptData if `value` is not signed with the key; without a key do nothing. `what` names it in
    messages."""
    if key and not hmac.compare_digest(_signature(value, key).encode(), value.signature.encode()):
        raise CorruptData(
            f"{what} is not signed with this run's key" if value.signature else f"{what} is not signed",
            "it was changed on the way, or it belongs to another run: check where weights are pulled from",
        )


def parse_line(data: bytes, key: bytes, what: str) -> Line:
    """Parse a line, validate it and check its signature."""
    try:
        line = json_decoder(Line).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{what} is not a valid line: {error}", "it is damaged") from error
    check_signature(line, key, what)
    return line


def parse_manifest(data: bytes, version: int, key: bytes, what: str) -> VersionManifest:
    """Parse the manifest of a version, validate it and check its signature and the names of its files."""
    try:
        manifest = json_decoder(VersionManifest).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{what} is not a valid manifest: {error}", "it is damaged") from error
    check_signature(manifest, key, what)
    if manifest.version != version:
        raise CorruptData(f"{what} belongs to version {manifest.version}", "it was moved or changed")
    if not all(FILE_NAME.fullmatch(name) for name in manifest.files):
        raise CorruptData(f"{what} has files with invalid names", "it was changed")
    return manifest


def _signature(value: Line | VersionManifest, key: bytes) -> str:
    canonical = msgspec.to_builtins(msgspec.structs.replace(value, signature=""), str_keys=True, order="sorted")
    return hmac.new(key, msgspec.json.encode(canonical), hashlib.sha256).hexdigest()


# ---------------------------------------------------------------- sources


class WeightSource(Protocol):
    """A source of a policy's published files: a folder, an object store, a weight server, a relay.

    Its answers are verified: sizes and hashes always, signatures if it has the key; CorruptData otherwise.
    """

    async def line(self, known: Line | None = None, wait: float = 0.0) -> Line:
        """Return the line; with `known`, as soon as it differs from it, or after `wait` seconds."""

    async def manifest(self, version: int) -> VersionManifest:
        """Return the manifest of a version; WeightsError if the source does not have it."""

    async def file(self, version: int, name: str) -> Path:
        """Return a local file with the content: the original, or a copy that stays until `forget`. Bytes that were
        fetched before are not fetched again."""

    async def forget(self, version: int) -> None:
        """Release the version's files: this reader no longer needs them."""

    async def close(self) -> None: ...


# ---------------------------------------------------------------- routes


class Route(NamedTuple):
    """The whole version `snapshot` (None: the version that the reader holds), then the deltas of `deltas`, in order."""

    snapshot: int | None
    deltas: tuple[int, ...]
    bytes: int


def route(entries: Mapping[int, Entry], have: int | None, want: int, mode: Mode = "auto") -> Route:
    """Return the route from `have` (None: nothing) to `want` with the fewest bytes.

    With mode `delta` it starts from `have` if that is possible, with mode `full` never, and then it has as few deltas
    as possible. Raises WeightsError if no route exists.
    """
    if have == want:
        return Route(None, (), 0)
    ways = list(_ways(entries, have if mode != "full" else None, want))
    if not ways:
        raise WeightsError(
            f"no route leads to version {want} from {'nothing' if have is None else f'version {have}'}",
            "the weight store has lost files that it needs: look at the newest line again, or restart the trainer, "
            "which writes its version whole",
        )
    return min(ways, key=lambda way: _cost(way, mode))


def _ways(entries: Mapping[int, Entry], have: int | None, want: int) -> Iterator[Route]:
    """Yield the routes, walking the chain backwards from `want`."""
    deltas: tuple[int, ...] = ()
    cost, at = 0, want
    while True:
        if at == have:
            yield Route(None, deltas, cost)
        entry = entries.get(at)
        if entry is None:
            return
        if entry.full_bytes:
            yield Route(at, deltas, cost + entry.full_bytes)
        # Lines come from outside: an entry that does not lead back must not cause an endless loop.
        if not entry.delta_bytes or entry.delta_of is None or entry.delta_of >= at:
            return
        deltas, cost, at = (at, *deltas), cost + entry.delta_bytes, entry.delta_of


def _cost(way: Route, mode: Mode) -> tuple[int, ...]:
    if mode == "delta":
        return int(way.snapshot is not None), way.bytes, len(way.deltas)
    return (len(way.deltas), way.bytes) if mode == "full" else (way.bytes, len(way.deltas))


# ---------------------------------------------------------------- retention


def in_reach(live: Collection[int], in_use: Collection[int], retain: int) -> set[int]:
    """Return the live versions from the oldest that a node serves on: nodes catch up by their deltas.

    At most the newest `retain`: a node that is further behind, or on an orphaned version, pulls a whole version.
    """
    used = [version for version in in_use if version in live]
    return {version for version in sorted(live)[-retain:] if used and version >= min(used)}


def with_needs(kept_versions: Collection[int], entries: Mapping[int, Entry], bases: Mapping[int, int]) -> set[int]:
    """Return these versions and all versions that they are built from; `bases` are those of adapters."""
    needed: set[int] = set()
    ahead = list(kept_versions)
    while ahead:
        version = ahead.pop()
        if version in needed:
            continue
        needed.add(version)
        entry = entries.get(version)
        if version in bases:
            ahead.append(bases[version])
        elif entry is not None and not entry.full_bytes and entry.delta_of is not None:
            ahead.append(entry.delta_of)
    return needed


def kept_versions(
    line: Line,
    there: Collection[int],
    bases: Mapping[int, int],
    *,
    keep: int,
    protect: Collection[int],
    in_use: Collection[int],
    retain: int,
) -> set[int]:
    """Return the versions to keep, of those that are `there`: the head, the newest `keep` live ones, those in
    `protect`, those by which nodes catch up, and the versions that all these are built from."""
    live = sorted(version for version in there if version not in line.orphaned)
    wanted = {*live[-keep:], *protect} if keep else set(protect)
    wanted |= in_reach(live, in_use, retain)
    if line.head is not None:
        wanted.add(line.head)
    return with_needs(wanted, line.entries, bases) & set(there)
