"""Weights laid ready for a server's workers: files in memory that live as long as an update."""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rillflow.contracts import Change
from rillflow.engine.servers.facts import ModelFacts
from rillflow.engine.servers.layout import Tainted, verify
from rillflow.errors import EngineError, EngineLost
from rillflow.weights import codec
from rillflow.weights.fingerprint import fingerprint

_SHARED_MEMORY = Path("/dev/shm")


class Update(ABC):
    """Weights on their way into the server: checked and laid ready, nothing changed yet."""

    @abstractmethod
    async def apply(self) -> None:
        """Change the weights, and verify them. WeightsError: nothing was changed; anything else: something may be."""

    @abstractmethod
    async def close(self) -> None:
        """Whatever was laid ready is removed."""


class Laid(NamedTuple):
    """A folder of safetensors files, how the workers take them, and what the tensors named are afterwards."""

    folder: Path
    method: str
    fingerprints: Mapping[str, int]


def lay_whole(tensors: Mapping[str, torch.Tensor]) -> Laid:
    folder = _written(tensors)
    return Laid(folder, "rillflow_load", {name: fingerprint(tensor) for name, tensor in tensors.items()})


def lay_changes(changes: Mapping[str, Change], fingerprints: Mapping[str, int]) -> Laid:
    return Laid(_written(dict(_entries(changes))), "rillflow_patch", fingerprints)


def _entries(changes: Mapping[str, Change]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (index_K, value_K) in changes.items():
        if value_K.numel() == 0:
            continue
        yield f"{name}:value", value_K.reshape(-1)
        if index_K is not None:
            small = int(index_K[-1]) < 2**31
            yield f"{name}:index", index_K.to(torch.int32) if small else index_K


def _written(tensors: Mapping[str, torch.Tensor]) -> Path:
    size = sum(tensor.nbytes for tensor in tensors.values())
    memory = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size
    folder = Path(tempfile.mkdtemp(prefix=f"rillflow-{os.getpid()}-", dir=_SHARED_MEMORY if memory else None))
    try:
        for name, pieces in codec.encode(tensors):
            with open(folder / name, "wb") as file:
                file.writelines(pieces)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder


class LaidUpdate(Update):
    """`rewrite` has the workers take the files, and returns what they hold then."""

    def __init__(self, model: ModelFacts, laid: Laid, rewrite: Callable[[str, list[str]], Awaitable[Any]]) -> None:
        self._model = model
        self._laid = laid
        self._rewrite = rewrite

    async def apply(self) -> None:
        paths = sorted(str(path) for path in self._laid.folder.iterdir())
        try:
            answers = await self._rewrite(self._laid.method, paths)
        except EngineLost:
            raise
        except EngineError as error:
            raise Tainted(f"the weights were not taken over: {error.message}", "load the whole weights") from error
        verify(self._model, self._laid.fingerprints, answers)

    async def close(self) -> None:
        shutil.rmtree(self._laid.folder, ignore_errors=True)
