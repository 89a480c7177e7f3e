"""The weights that a node holds on its host: the published tensors of one version, bit for bit.

Invariants: a node holds one whole published version, with known fingerprints; a delta is decoded and its result
compared with the manifest before the first bit changes, so a damaged delta, or one of another base, changes nothing.
Names that share a tensor (tied weights) share it here too, and a patch names it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from rillflow.contracts import Change, Patch
from rillflow.errors import CorruptData, WeightsError
from rillflow.weights.codec import tensor_facts
from rillflow.weights.manifest import TensorFacts, VersionManifest

if TYPE_CHECKING:
    from rillflow.contracts import Tensors
    from rillflow.weights.delta_file import Piece

# Modules that compute on weights are imported lazily: their compiler takes long to load.

S = TypeVar("S")
T = TypeVar("T")

_THREADS = 4  # pieces that are decoded concurrently
_MODULUS = 1 << 64  # of fingerprints
_DENSE = 1 / 8  # if a larger share of a tensor has changed, a patch has all of it


class Step(NamedTuple):
    """One delta of a route: the manifest of the version that it makes, and its verified files."""

    manifest: VersionManifest
    paths: Sequence[Path]


class _Moved(NamedTuple):
    """The change of a tensor by a piece, and its contribution to the fingerprint."""

    change: Change
    gained: int


class NodeWeights:
    """The held weights, for one thread. `tensors`, with aliases, and the tensors of patches are valid until the next
    change."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.fingerprints: dict[str, int] = {}  # empty until a manifest gives them or a delta needs them
        self._facts: Mapping[str, TensorFacts] = {}
        self._flat: dict[str, torch.Tensor] = {}  # without aliases; the memory of `tensors`

    def forget(self) -> None:
        """Drop the weights: the next version must be whole."""
        self.version, self.tensors, self.fingerprints, self._facts, self._flat = None, {}, {}, {}, {}

    def replace(self, tensors: Tensors, manifest: VersionManifest, *, verified: bool = False) -> None:
        """Hold these tensors, which must not be changed elsewhere. CorruptData if they differ from the manifest.

        With `verified` they come from files with the manifest's hashes, and its fingerprints are not computed again.
        """
        unique = {name: tensors[name].contiguous() for name in manifest.tensors if name in tensors}
        if {name: tensor_facts(tensor) for name, tensor in unique.items()} != manifest.tensors:
            raise CorruptData(f"version {manifest.version} has other tensors than its manifest names", "it was changed")
        found = told = manifest.tensor_fingerprints()
        if not verified or (told and set(told) != set(unique)):
            found = _fingerprints(unique)
        for name, known in told.items():
            if found.get(name) != known:
                raise CorruptData(
                    f"{name} of version {manifest.version} does not have its fingerprint", "it was changed"
                )
        self._facts = manifest.tensors
        self._flat = {name: tensor.detach().view(-1) for name, tensor in unique.items()}
        self.tensors = unique | {alias: unique[name] for alias, name in manifest.aliases.items()}
        self.fingerprints = found
        self.version = manifest.version

    def advance(self, steps: Sequence[Step]) -> Patch:
        """Apply these steps to the held version; return one patch of all steps.

        CorruptData for a damaged step, WeightsError for one of another base: the steps before it have been applied.
        """
        if self.version is None:
            raise WeightsError("a delta needs held weights", "pull a whole version first")
        base, taken = self.version, [self._take(step) for step in steps]
        names = dict.fromkeys(name for changes in taken for name in changes)
        changes = {
            name: self._joined(name, [change for one in taken for change in one.get(name, ())]) for name in names
        }
        return Patch(base, changes, {name: self.fingerprints[name] for name in names})

    # ------------------------------------------------------------ one step

    def _take(self, step: Step) -> dict[str, list[Change]]:
        from rillflow.weights import delta_file

        manifest = step.manifest
        self._check(manifest)
        if not self.fingerprints:
            self.fingerprints = _fingerprints(self._flat)
        changes: dict[str, list[Change]] = defaultdict(list)
        now = dict(self.fingerprints)
        for found in _at_once(self._moved, delta_file.read(step.paths)):
            for name, one in found.items():  # parts of a tensor begin at whole words, so their contributions add up
                changes[name].append(one.change)
                now[name] = (now[name] + one.gained) % _MODULUS
        for name, known in manifest.tensor_fingerprints().items():
            if now.get(name) != known:
                raise CorruptData(
                    f"{name} would not have the fingerprint that version {manifest.version} gives it",
                    "the delta and the manifest do not belong together",
                )
        self._write(changes, manifest.version, now)
        return changes

    def _check(self, manifest: VersionManifest) -> None:
        if manifest.delta_of != self.version:
            raise WeightsError(
                f"the delta of version {manifest.version} needs version {manifest.delta_of}, not {self.version}",
                "use another route",
            )
        if self._facts != manifest.tensors:
            raise CorruptData(
                f"version {manifest.version} has other tensors than version {self.version}", "its manifest was changed"
            )

    def _moved(self, piece: Piece) -> dict[str, _Moved]:
        """Return the change of each tensor by a piece, without changing the tensors."""
        from rillflow.weights.delta_file import changes_of
        from rillflow.weights.fingerprint import moved

        changes = changes_of(piece, self._flat, self.fingerprints)
        return {name: _Moved(change, moved(0, self._flat[name], change)) for name, change in changes.items()}

    def _write(self, changes: Mapping[str, Sequence[Change]], version: int, now: dict[str, int]) -> None:
        from rillflow.weights.fingerprint import bits_of

        self.version = None  # if writing fails, no whole version is held
        for name, of_tensor in changes.items():
            held_N = bits_of(self._flat[name])
            for index_K, value_K in of_tensor:
                held_N[slice(None) if index_K is None else index_K.numpy()] = bits_of(value_K)
        self.version, self.fingerprints = version, now

    def _joined(self, name: str, changes: Sequence[Change]) -> Change:
        """Join changes into one: all changed places, with their current values."""
        flat = self._flat[name]
        if len(changes) == 1 and changes[0].index_K is not None:
            return changes[0]
        places = [change.index_K for change in changes if change.index_K is not None]
        if len(places) < len(changes):
            return Change(None, flat)
        index_K = _merged(places)
        return Change(None, flat) if len(index_K) > _DENSE * len(flat) else Change(index_K, flat[index_K])


def _merged(places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the union of these places, in order, in time proportional to the places."""
    from rillflow.kernels.delta import union

    return torch.from_numpy(reduce(union, (index_K.numpy() for index_K in places)))


def _fingerprints(tensors: Tensors) -> dict[str, int]:
    from rillflow.weights.fingerprint import fingerprint

    return dict(zip(tensors, _at_once(fingerprint, list(tensors.values())), strict=True))


def _at_once(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Map `work` over items in threads: the codec's loops release the interpreter."""
    if len(items) < 2:  # a thread would take longer, waiting for the interpreter
        return [work(item) for item in items]
    with ThreadPoolExecutor(_THREADS, "held") as pool:
        return list(pool.map(work, items))
