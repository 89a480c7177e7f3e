"""Checkpoints: sealed folders from which a trainer continues exactly, with any number of ranks.

    c00000012/model.safetensors          masters, fp32          one rank
              optimizer.safetensors      moments of AdamW
              model-rank00001.safetensors, …                    several ranks: the slices of each
              state.json                 version, step, random states, hash of the recipe
              manifest.json              size and SHA-256 of each file

Tensors are cut along their first axis as `torch.chunk` cuts, which is also the layout of sharded models (FSDP2). The
header of a file holds the first row of each slice and the number of rows of the whole tensor.

Invariants: a checkpoint exists as a whole or not at all; it is written while training goes on, from a copy in memory,
one at a time; every rank writes its own slices, and rank 0 seals the folder when all are written. A checkpoint that
does not match its manifest is never used: some rank verifies every file before any rank uses a number from it, and a
damaged one is renamed to `damaged-…`, so that its version cannot return after training went on without it. A tensor is
built from slices that cover every row once, or CorruptData is raised. Why this is not torch.distributed.checkpoint:
docs/decisions.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from rillflow.errors import CheckpointError, CorruptData
from rillflow.storage import disk_errors
from rillflow.trainer.background import DEADLINE, BackgroundWriter, HostCopy, collect, hand_in
from rillflow.trainer.parallel import Alone, Peers
from rillflow.trainer.parallel.sharding import shard_place
from rillflow.types.base import json_decoder
from rillflow.weights import sealed
from rillflow.weights.codec import encode

if TYPE_CHECKING:
    from rillflow.contracts import Tensors


log = logging.getLogger(__name__)


SLICES = "slices"
Range = tuple[int, int]
Wanted = Callable[[str, tuple[int, ...]], Range]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which is all of it unless it is sharded."""
    held: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return held


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


def own_slices(tensors: Tensors, rank: int, ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the slices that this rank writes, and a note of their rows. Rank 0 writes scalars; of a model with copies
    only the first is written."""
    mine: dict[str, torch.Tensor] = {}
    rows: dict[str, Range] = {}
    for name, tensor in tensors.items():
        place = shard_place(tensor, rank, ranks)
        start, stop = place.rows(tensor.shape[0]) if tensor.ndim else (0, 1)
        if tensor.ndim == 0 and rank == 0:
            mine[name] = local(tensor)
        elif tensor.ndim and start < stop and place.copy == 0:
            mine[name] = local(tensor) if is_sharded(tensor) else tensor[start:stop]
            rows[name] = (start, tensor.shape[0])
    return mine, {SLICES: json.dumps(rows)} if ranks > 1 else {}


def wanted_by(like: Tensors, rank: int, ranks: int) -> Wanted:
    """Return a function that gives the rows of a tensor that this rank needs.

    It needs its own shard of a tensor that is sharded in `like`, and of a tensor with the shape of such a tensor and
    its name after a word (`exp_avg/`). It needs all rows of any other tensor.
    """
    sharded = {name: tensor for name, tensor in like.items() if is_sharded(tensor)}

    def wanted(name: str, shape: tuple[int, ...]) -> Range:
        found = (sharded.get(known) for known in _bare(name))
        alike = next((tensor for tensor in found if tensor is not None and tuple(tensor.shape) == shape), None)
        return (0, shape[0]) if alike is None else shard_place(alike, rank, ranks).rows(shape[0])

    return wanted


def _bare(name: str) -> Iterator[str]:
    """Yield the name, and the names without one of its words."""
    words = name.split("/")
    yield name
    for at in range(len(words) - 1):
        yield "/".join(words[:at] + words[at + 1 :])


def read_slices(paths: Sequence[Path], wanted: Wanted) -> dict[str, torch.Tensor]:
    """Read the wanted rows of all tensors in these files, which have been verified."""
    pieces = _Pieces(wanted)
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                pieces.add(file)
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CorruptData(f"{path} is not a file of slices: {error}", "it is damaged") from error
    return pieces.whole()


class _Pieces:
    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._found: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}

    def add(self, file: Any) -> None:
        notes: Mapping[str, Range] = json.loads((file.metadata() or {}).get(SLICES, "{}"))
        for name in file.keys():  # noqa: SIM118
            view = file.get_slice(name)
            shape = tuple(view.get_shape())
            if shape:
                self._add(name, view, shape, notes.get(name, (0, shape[0])))
            else:
                self._found[name] = file.get_tensor(name)

    def _add(self, name: str, view: Any, shape: tuple[int, ...], place: Range) -> None:
        """Add a slice; `place` is its first row and the number of rows of the whole tensor."""
        offset, rows = place
        start, stop = self._wanted(name, (rows, *shape[1:]))
        low, high = max(start, offset), min(stop, offset + shape[0])
        piece = view[low - offset : high - offset] if low < high else view[:0]
        if name not in self._found:
            alone = low == start and high == stop
            self._found[name] = piece if alone else torch.empty((stop - start, *shape[1:]), dtype=piece.dtype)
            self._missing[name] = stop - start
        if low < high:
            self._found[name][low - start : high - start] = piece
            self._missing[name] -= high - low

    def whole(self) -> dict[str, torch.Tensor]:
        if torn := [name for name, rows in self._missing.items() if rows]:
            raise CorruptData(f"the slices of {torn[0]} are incomplete", "a file of the checkpoint is missing")
        return self._found


# ---------------------------------------------------------------- checkpoints


T = TypeVar("T")

_NAME = re.compile(r"c(\d{8,})")
_DAMAGED = "damaged-"
_MODEL, _OPTIMIZER = "model", "optimizer"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON part. `random` holds rank 0's generator states of torch per device, in base64; `peers` those of the
    other ranks."""

    version: int
    step: int
    recipe: str
    random: dict[str, str]
    peers: list[dict[str, str]] = []

    def random_of(self, rank: int) -> dict[str, str]:
        """Return the state of a rank; a rank that did not exist then has none."""
        states = [self.random, *self.peers]
        return states[rank] if rank < len(states) else {}


class _HandedIn(msgspec.Struct, frozen=True):
    """The report of a rank to rank 0 once its slices are written."""

    files: dict[str, sealed.FileFacts]
    random: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """The state that one rank continues from; of sharded tensors it holds the rank's own shard."""

    state: State
    masters: Tensors
    moments: Tensors


class Checkpoints(BackgroundWriter):
    """The checkpoints of one policy, of which the newest `keep` stay. Every rank has an instance and makes equal
    calls."""

    def __init__(self, folder: Path, keep: int, peers: Peers | None = None, *, deadline: float = DEADLINE) -> None:
        super().__init__("the checkpoint", deadline)
        self._folder = folder
        self._keep = keep
        self._peers = peers or Alone()
        self._patience = deadline / 2  # for other ranks; it ends before this rank's own deadline
        self._copies = {_MODEL: HostCopy(), _OPTIMIZER: HostCopy()}
        self._begun: int | None = None

    def versions(self) -> list[int]:
        """Return the durable checkpoints, in ascending order, whether valid or not."""
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    @property
    def needed(self) -> set[int]:
        """Return the versions that a restart may need: the durable ones, and the one that is being written."""
        return {*self.versions(), *([] if self._begun is None else [self._begun])}

    # ------------------------------------------------------------ writing

    def begin(self, state: State, masters: Tensors, moments: Tensors) -> None:
        """Copy the state and write the copy in the background. First wait for the last one and raise its error, if
        any."""
        self._background.settle()
        self._begun = state.version
        writer = self._peers.first(uuid.uuid4().hex.encode()).decode()
        slices = {}
        for stem, tensors in ((_MODEL, masters), (_OPTIMIZER, moments)):
            mine, notes = own_slices(tensors, self._peers.rank, self._peers.size)
            slices[self._stem(stem)] = (self._copies[stem].take(mine), notes)
        self._background.start(partial(self._write, state, slices, writer))

    def save(self, state: State, masters: Tensors, moments: Tensors) -> None:
        """Write a checkpoint; it is durable when this returns."""
        self.begin(state, masters, moments)
        self.finish()

    def _stem(self, stem: str) -> str:
        return stem if self._peers.size == 1 else f"{stem}-rank{self._peers.rank:05d}"

    def _write(self, state: State, slices: Mapping[str, tuple[Tensors, Mapping[str, str]]], writer: str) -> None:
        target = self._path(state.version)
        temporary = sealed.unfinished(target, writer)
        files = chain.from_iterable(encode(mine, stem, notes) for stem, (mine, notes) in slices.items())
        with sealed.cleaned(temporary, target):
            written = sealed.fill(temporary, files)
            if self._peers.rank > 0:
                hand_in(temporary, self._peers.rank, _HandedIn(written, state.random))
                return
            others = [collect(temporary, rank, _HandedIn, self._patience) for rank in range(1, self._peers.size)]
            state = msgspec.structs.replace(state, peers=[other.random for other in others])
            for other in others:
                written |= other.files
            written |= sealed.fill(temporary, [("state.json", msgspec.json.encode(state))])
            sealed.close(temporary, target, sealed.plain(written))
        sealed.remove_leftovers(self._folder)
        for version in self.versions()[: -self._keep]:
            sealed.remove(self._path(version))

    # ------------------------------------------------------------ reading

    def latest_valid(self, like: Tensors | None = None) -> Checkpoint | None:
        """Return the newest valid checkpoint; None if none was ever written. All ranks call it together.

        `like` are this rank's present masters: of a sharded one, only the rank's own rows are read.
        """
        versions = msgspec.json.decode(self._peers.first(msgspec.json.encode(self.versions())), type=list[int])
        damaged: list[int] = []
        for version in reversed(versions):
            found, why = self._found(version, like or {})
            if found is not None:
                self._set_aside(damaged)
                return found
            log.warning("checkpoint %d is damaged and not used: %s", version, why)
            damaged.append(version)
        if damaged or self._has_damaged():
            raise CheckpointError(
                f"{self._folder} has no valid checkpoint",
                "restore one from a copy; or remove this folder to begin again from the initial weights",
            )
        return None

    def load(self, version: int) -> Checkpoint:
        """Read a whole checkpoint in one process; CorruptData if one byte differs."""
        self._verify(version, 0, 1)
        return self._read(version, {})

    def _found(self, version: int, like: Tensors) -> tuple[Checkpoint | None, str]:
        """Return the checkpoint, or the reason why some rank cannot use it."""
        _, why = self._agreed(lambda: self._verify(version, self._peers.rank, self._peers.size))
        return (None, why) if why else self._agreed(lambda: self._read(version, like))

    def _agreed(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """Return the result if the action succeeds on every rank; otherwise the error of the first rank that failed."""
        result, own_why = None, ""
        try:
            result = action()
        except CorruptData as error:
            own_why = str(error)
        why = next((said for said in self._peers.everyone(own_why.encode()) if said), b"").decode()
        return (None, why) if why else (result, "")

    def _verify(self, version: int, rank: int, ranks: int) -> None:
        """Verify this rank's share of the files."""
        folder = self._path(version)
        manifest = sealed.read_manifest(folder, sealed.Manifest)
        for name in sorted(manifest.files)[rank::ranks]:
            sealed.verify_file(folder, name, manifest)

    def _read(self, version: int, like: Tensors) -> Checkpoint:
        folder = self._path(version)
        manifest = sealed.read_manifest(folder, sealed.Manifest)
        try:
            state = json_decoder(State).decode(sealed.read_file(folder, "state.json", manifest))
        except msgspec.MsgspecError as error:
            raise CorruptData(f"{folder / 'state.json'} is not a valid state: {error}", "it was changed") from error
        wanted = wanted_by(like, self._peers.rank, self._peers.size)
        masters, moments = (read_slices(_files(folder, manifest, stem), wanted) for stem in (_MODEL, _OPTIMIZER))
        return Checkpoint(state=state, masters=masters, moments=moments)

    def _set_aside(self, versions: list[int]) -> None:
        for version in versions if self._peers.rank == 0 else []:
            path = self._path(version)
            aside = path.with_name(_DAMAGED + path.name)
            if aside.exists():
                aside = aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:8]}")
            with disk_errors(path):
                os.replace(path, aside)

    def _has_damaged(self) -> bool:
        return self._folder.is_dir() and any(self._folder.glob(f"{_DAMAGED}*"))

    def _path(self, version: int) -> Path:
        return self._folder / f"c{version:08d}"


def _files(folder: Path, manifest: sealed.Manifest, stem: str) -> Sequence[Path]:
    """Return the files of masters or of moments, by the beginning of their names."""
    return [folder / name for name in manifest.files if re.split(r"[-.]", name)[0] == stem]


# ---------------------------------------------------------------- random states


def random_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: base64.b64encode(state.numpy().tobytes()).decode() for device, state in states.items()}


def restore_random(states: Mapping[str, str]) -> None:
    """Set the states of the generators; the state of an absent device is ignored."""
    for device, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
