"""Updates of a server's weights: files in memory that live as long as an update, or published deltas that the workers
decode.

Invariant: the files in memory are locked while the process lives that will remove them; files of a process that was
killed are removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from rillflow.contracts import Change, Deltas
from rillflow.engine.servers.facts import ModelFacts, Tainted, verify
from rillflow.errors import EngineError, EngineLost, WeightsError
from rillflow.weights import codec, delta_file
from rillflow.weights.fingerprint import fingerprint

_SHARED_MEMORY = Path("/dev/shm")
_YOUNG_SECONDS = 60.0  # a folder's files may not be there yet


class Update(ABC):
    """New weights for a server, checked and prepared; nothing has changed yet. `seconds` are the times of the parts of
    `apply` in the slowest worker."""

    seconds: Mapping[str, float] = {}

    @abstractmethod
    async def apply(self) -> None:
        """Change the weights and verify them. After a WeightsError nothing has changed; after another one some may."""

    @abstractmethod
    async def close(self) -> None:
        """Remove everything that was prepared."""


class Laid(NamedTuple):
    """A folder of safetensors files, the method of the workers that takes them, and the fingerprints afterwards."""

    folder: Path
    files: Sequence[IO[bytes]]
    method: str
    fingerprints: Mapping[str, int]

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for file in self.files:
            file.close()


def lay_whole(tensors: Mapping[str, torch.Tensor]) -> Laid:
    fingerprints = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    return Laid(*_written(tensors), "rillflow_load", fingerprints)


def lay_changes(changes: Mapping[str, Change], fingerprints: Mapping[str, int]) -> Laid:
    """Write the changes; tensors without a change are left out."""
    changes = {name: change for name, change in changes.items() if change.value_K.numel()}
    expected = {name: value for name, value in fingerprints.items() if name in changes}
    return Laid(*_written(dict(_entries(changes))), "rillflow_patch", expected)


def _entries(changes: Mapping[str, Change]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (index_K, value_K) in changes.items():
        yield f"{name}:value", value_K.reshape(-1)
        if index_K is not None:
            small = int(index_K[-1]) < 2**31
            yield f"{name}:index", index_K.to(torch.int32) if small else index_K


def _written(tensors: Mapping[str, torch.Tensor]) -> tuple[Path, list[IO[bytes]]]:
    _sweep()
    size = sum(tensor.nbytes for tensor in tensors.values())
    memory = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size
    folder = Path(tempfile.mkdtemp(prefix=f"rillflow-{os.getpid()}-", dir=_SHARED_MEMORY if memory else None))
    files: list[IO[bytes]] = []
    try:
        for name, pieces in codec.encode(tensors):
            files.append(open(folder / name, "wb"))  # noqa: SIM115 - it stays open: with it goes the lock
            fcntl.flock(files[-1], fcntl.LOCK_EX)
            files[-1].writelines(pieces)
            files[-1].flush()
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder, files


def _sweep() -> None:
    """Remove the folders of processes that were killed."""
    for folder in _SHARED_MEMORY.glob("rillflow-*-*"):
        with suppress(OSError):  # it is locked, it has gone meanwhile, or it is another user's
            if time.time() - folder.stat().st_mtime > _YOUNG_SECONDS:
                for path in folder.iterdir():
                    with open(path, "rb") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


Rewrite = Callable[[str, list[Any]], Awaitable[Any]]  # a method of all workers and its argument


class WorkersUpdate(Update):
    """An update by one method of the workers, whose answers must have the expected fingerprints."""

    def __init__(self, model: ModelFacts, rewrite: Rewrite, fingerprints: Mapping[str, int]) -> None:
        self._model = model
        self._rewrite = rewrite
        self._fingerprints = fingerprints

    async def _call(self, method: str, argument: list[Any]) -> None:
        try:
            answers = await self._rewrite(method, argument)
        except EngineLost:
            raise
        except EngineError as error:
            raise Tainted(f"the weights were not taken over: {error.message}", "load the whole weights") from error
        self.seconds = {part: max(answer["seconds"][part] for answer in answers) for part in answers[0]["seconds"]}
        verify(self._model, self._fingerprints, [answer["held"] for answer in answers])


class LaidUpdate(WorkersUpdate):
    """Files that the workers take tensors or changes from."""

    def __init__(self, model: ModelFacts, laid: Laid, rewrite: Rewrite) -> None:
        super().__init__(model, rewrite, laid.fingerprints)
        self._laid = laid

    async def apply(self) -> None:
        await self._call(self._laid.method, sorted(str(path) for path in self._laid.folder.iterdir()))

    async def close(self) -> None:
        self._laid.remove()


class DeltaUpdate(WorkersUpdate):
    """Published deltas that the workers decode. WeightsError when they are not deltas of this model's weights."""

    def __init__(self, model: ModelFacts, deltas: Deltas, rewrite: Rewrite) -> None:
        steps = [delta_file.locate(paths) for paths in deltas.steps]
        names = dict.fromkeys(part.tensor for step in steps for piece in step for part in piece.parts)
        unknown = [name for name in names if name not in model.aliases or name not in deltas.fingerprints]
        if unknown:
            raise WeightsError(f"a delta of {unknown[0]}, which is not in the model", "is it the same architecture?")
        if len({model.aliases[name] for name in names}) < len(names):
            raise WeightsError("tensors that are tied in the model were published apart", "the node applies them")
        raw = [piece.parts[0].tensor for step in steps for piece in step if piece.kind != "delta"]
        if raw:
            raise WeightsError(f"{raw[0]} has a dtype that is not coded as a delta", "the node applies it")
        super().__init__(model, rewrite, {model.aliases[name]: deltas.fingerprints[name] for name in names})
        self._steps = [
            [
                [str(one.path), one.begin, one.size, [[model.aliases[name], *rest] for name, *rest in one.parts]]
                for one in step
            ]
            for step in steps
        ]

    async def apply(self) -> None:
        await self._call("rillflow_decode", self._steps)

    async def close(self) -> None:
        """Do nothing: the files belong to the puller."""
