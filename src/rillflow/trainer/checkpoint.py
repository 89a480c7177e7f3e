"""Checkpoints: sealed folders from which a trainer continues exactly.

    c00000012/model.safetensors        masters, fp32
              optimizer.safetensors    moments of AdamW
              state.json               version, step, random state, hash of the recipe
              manifest.json            size and SHA-256 of each file

Invariants: a checkpoint is there whole or not at all; one that does not match its manifest is never used, and is
kept aside as `damaged-…` so that its number cannot come back to life after the line has gone on without it.
"""

from __future__ import annotations

import base64
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from rillflow.errors import CheckpointError, CorruptData
from rillflow.storage import disk_errors
from rillflow.weights import sealed
from rillflow.weights.codec import decode, encode

if TYPE_CHECKING:
    from rillflow.contracts import Tensors

log = logging.getLogger(__name__)

_NAME = re.compile(r"c(\d{8,})")
_DAMAGED = "damaged-"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON part. `random` is torch's generator state per device, base64."""

    version: int
    step: int
    recipe: str
    random: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    state: State
    masters: Tensors
    moments: Tensors


class Checkpoints:
    """The checkpoints of one policy, of which the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def versions(self) -> list[int]:
        """In ascending order, whether valid or not."""
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def save(self, checkpoint: Checkpoint) -> None:
        """Durable when this returns; then older ones beyond `keep` go."""
        files = (
            *encode(checkpoint.masters, "model"),
            *encode(checkpoint.moments, "optimizer"),
            ("state.json", msgspec.json.encode(checkpoint.state)),
        )
        sealed.seal(self._path(checkpoint.state.version), files, {})
        sealed.remove_leftovers(self._folder)
        for version in self.versions()[: -self._keep]:
            sealed.remove(self._path(version))

    def latest_valid(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None when none was ever written."""
        damaged: list[int] = []
        for version in reversed(self.versions()):
            try:
                found = self.load(version)
            except CorruptData as error:
                log.warning("checkpoint %d is damaged and not used: %s", version, error)
                damaged.append(version)
                continue
            self._set_aside(damaged)
            return found
        if damaged or self._has_damaged():
            raise CheckpointError(
                f"none of the checkpoints in {self._folder} is valid",
                "restore one from a copy; or remove this folder to begin again from the initial weights",
            )
        return None

    def load(self, version: int) -> Checkpoint:
        """Every byte verified; CorruptData when one differs."""
        folder = self._path(version)
        manifest = sealed.read_manifest(folder, sealed.Manifest)
        parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
        for name in manifest.files:
            stem = name.partition(".")[0].partition("-")[0]
            if stem in parts:
                parts[stem] |= decode(sealed.read_file(folder, name, manifest), str(folder / name))
        try:
            state = msgspec.json.decode(sealed.read_file(folder, "state.json", manifest), type=State)
        except msgspec.MsgspecError as error:
            raise CorruptData(f"{folder / 'state.json'} is not a state: {error}", "it was changed") from error
        return Checkpoint(state=state, masters=parts["model"], moments=parts["optimizer"])

    def _set_aside(self, versions: list[int]) -> None:
        for version in versions:
            path = self._path(version)
            with disk_errors(path):
                os.replace(path, path.with_name(_DAMAGED + path.name))

    def _has_damaged(self) -> bool:
        return self._folder.is_dir() and any(self._folder.glob(f"{_DAMAGED}*"))

    def _path(self, version: int) -> Path:
        return self._folder / f"c{version:08d}"


def random_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: base64.b64encode(state.numpy().tobytes()).decode() for device, state in states.items()}


def restore_random(states: dict[str, str]) -> None:
    """Continue the generators; one whose device is not here is left alone."""
    for device, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
