"""Checkpoints: sealed folders from which a trainer continues exactly, with any number of ranks.

    c00000012/model.safetensors          masters, fp32          of one rank
              optimizer.safetensors      moments of AdamW
              model-rank00001.safetensors, …                    of several: the slices of each (slices.py)
              state.json                 version, step, random states, hash of the recipe
              manifest.json              size and SHA-256 of each file

Invariants: a checkpoint is there whole or not at all; it is written while training goes on, from a copy in memory, one
at a time; every rank writes its own slices and rank 0 seals the folder when all are there. One that does not match its
manifest is never used: every file is verified by some rank before any rank takes a number out of it, and a damaged one
is kept aside as `damaged-…` so that its number cannot come back to life after the line has gone on without it.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from rillflow.errors import CheckpointError, CorruptData
from rillflow.storage import disk_errors
from rillflow.trainer.background import DEADLINE, Background, HostCopy
from rillflow.trainer.parallel.handing import collect, hand_in
from rillflow.trainer.parallel.peers import Alone, Peers
from rillflow.trainer.slices import own, read, wanted_by
from rillflow.types.decoding import json_decoder
from rillflow.weights import sealed
from rillflow.weights.codec import encode

if TYPE_CHECKING:
    from rillflow.contracts import Tensors

log = logging.getLogger(__name__)
T = TypeVar("T")

_NAME = re.compile(r"c(\d{8,})")
_DAMAGED = "damaged-"
_MODEL, _OPTIMIZER = "model", "optimizer"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON part. `random` is torch's generator state per device, base64, of rank 0; `peers` has those of the
    others. `more` is for who needs to remember more."""

    version: int
    step: int
    recipe: str
    random: dict[str, str]
    peers: list[dict[str, str]] = []
    more: dict[str, Any] = {}

    def random_of(self, rank: int) -> dict[str, str]:
        """Of a rank that was there; a new one has none to go on with."""
        states = [self.random, *self.peers]
        return states[rank] if rank < len(states) else {}


class _HandedIn(msgspec.Struct, frozen=True):
    """What a rank tells rank 0 once its slices are written."""

    files: dict[str, sealed.FileFacts]
    random: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """What one rank continues from: of sharded tensors its own shard."""

    state: State
    masters: Tensors
    moments: Tensors


class Checkpoints:
    """The checkpoints of one policy, of which the newest `keep` stay. Every rank has one and calls the same."""

    def __init__(self, folder: Path, keep: int, peers: Peers | None = None, *, deadline: float = DEADLINE) -> None:
        self._folder = folder
        self._keep = keep
        self._peers = peers or Alone()
        self._patience = deadline / 2  # with other ranks, so that it is over before that with this one is
        self._background = Background("the checkpoint", deadline)
        self._copies = {_MODEL: HostCopy(), _OPTIMIZER: HostCopy()}
        self._begun: int | None = None

    def versions(self) -> list[int]:
        """Those that are durable, in ascending order, whether valid or not."""
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    @property
    def needed(self) -> set[int]:
        """The versions that a restart may need: the durable ones, and the one that is being written."""
        return {*self.versions(), *([] if self._begun is None else [self._begun])}

    # ------------------------------------------------------------ writing

    def begin(self, state: State, masters: Tensors, moments: Tensors) -> None:
        """Copy, and write the copy while training goes on. Waits for the last one, and raises what it raised."""
        self._background.settle()
        self._begun = state.version
        writer = self._peers.first(uuid.uuid4().hex.encode()).decode()
        slices = {}
        for stem, tensors in ((_MODEL, masters), (_OPTIMIZER, moments)):
            mine, notes = own(tensors, self._peers.rank, self._peers.size)
            slices[self._stem(stem)] = (self._copies[stem].take(mine), notes)
        self._background.start(partial(self._write, state, slices, writer))

    def check(self) -> None:
        """Raise what has gone wrong while writing."""
        self._background.check()

    def finish(self) -> None:
        """Returns once the last one is durable."""
        self._background.settle()

    def close(self) -> None:
        """For who ends because of something else."""
        self._background.close()

    def save(self, state: State, masters: Tensors, moments: Tensors) -> None:
        """Durable when this returns."""
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
        """The newest checkpoint that is whole; None when none was ever written. All ranks call it together.

        `like` are this rank's present masters: where one of them is sharded, only its own rows are read.
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
                f"none of the checkpoints in {self._folder} is valid",
                "restore one from a copy; or remove this folder to begin again from the initial weights",
            )
        return None

    def load(self, version: int) -> Checkpoint:
        """All of it, for one process; CorruptData when one byte differs."""
        self._verify(version, 0, 1)
        return self._read(version, {})

    def _found(self, version: int, like: Tensors) -> tuple[Checkpoint | None, str]:
        """The checkpoint, or why some rank cannot use it."""
        _, why = self._agreed(lambda: self._verify(version, self._peers.rank, self._peers.size))
        return (None, why) if why else self._agreed(lambda: self._read(version, like))

    def _agreed(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """What it gives if it succeeds on every rank; otherwise what the first of them says."""
        result, own_why = None, ""
        try:
            result = action()
        except CorruptData as error:
            own_why = str(error)
        why = next((said for said in self._peers.everyone(own_why.encode()) if said), b"").decode()
        return (None, why) if why else (result, "")

    def _verify(self, version: int, rank: int, ranks: int) -> None:
        """This rank's share of the files."""
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
            raise CorruptData(f"{folder / 'state.json'} is not a state: {error}", "it was changed") from error
        wanted = wanted_by(like, self._peers.rank, self._peers.size)
        masters, moments = (read(_files(folder, manifest, stem), wanted) for stem in (_MODEL, _OPTIMIZER))
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
    """Of masters or moments, by the beginning of their names."""
    return [folder / name for name in manifest.files if re.split(r"[-.]", name)[0] == stem]


# ---------------------------------------------------------------- random states


def random_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: base64.b64encode(state.numpy().tobytes()).decode() for device, state in states.items()}


def restore_random(states: Mapping[str, str]) -> None:
    """Continue the generators; one whose device is not here is left alone."""
    for device, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
