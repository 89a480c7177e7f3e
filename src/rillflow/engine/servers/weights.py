"""The weights of a server: facts about a model's published weights, their layout in the workers, and updates of them.

`ModelFacts` has the names, shapes, dtype and tied names, known before any weight is read. The layout in the workers is
checked and added up over ranks. An update is files in memory that live as long as it does, or published deltas that the
workers decode.

Invariants: weights that pass `whole` or `changes` fit the model, and a shared tensor is in them once, under its first
name. Parts of a tensor that several ranks hold alike count once, and only if they are the same on all of them. The
files in memory are locked while the process lives that will remove them; files of a process that was killed are removed
by the next one.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rillflow.contracts import Change, Deltas
from rillflow.engine.experts import routers_of
from rillflow.errors import ConfigError, EngineError, EngineLost, WeightsError
from rillflow.weights import codec, delta_file
from rillflow.weights.fingerprint import fingerprint
from rillflow.weights.model_folder import model_folder
from rillflow.weights.models import DTYPES, Dtype

if TYPE_CHECKING:
    from rillflow.contracts import Change, Patch, Tensors

_T = TypeVar("_T")
_HINT = "weights are changed in place: serve the model unquantised, in the dtype that is published"
_SHARED_MEMORY = Path("/dev/shm")
_READY_SECONDS, _LOOK_SECONDS = 60.0, 0.01  # to decode while the server samples, and between two looks whether it has
_YOUNG_SECONDS = 60.0  # a folder's files may not be there yet


class Piece(NamedTuple):
    """A part of a published tensor, and its name in a checkpoint."""

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class ModelFacts:
    """A model as its published weights are named: `aliases` has, for every name, the first one of the same tensor.
    `router_layers` are the numbers of the layers that have a router of experts. `pieces` are those of the tensors that
    checkpoints name otherwise, such as stacks of experts, which they have expert by expert. `linears` are the names of
    the linear layers but the head."""

    folder: Path
    dtype: Dtype
    vocabulary: int
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    router_layers: tuple[int, ...] = ()
    pieces: Mapping[str, Sequence[Piece]] = field(default_factory=dict)
    linears: tuple[str, ...] = ()

    def whole(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return all weights, each tensor once. Raise WeightsError when they are not those of this model."""
        self._refuse_unknown(tensors)
        given = self._once(tensors, torch.equal)
        missing = sorted(set(self.shapes) - set(given))
        if missing:
            raise WeightsError(f"weights missing: {_some(missing)}", "give the full set of weights")
        for name, tensor in given.items():
            self._check_dtype(name, tensor)
            if tuple(tensor.shape) != self.shapes[name]:
                raise WeightsError(
                    f"{name} has shape {tuple(tensor.shape)}, the model {self.shapes[name]}", "is it the same size?"
                )
        return given

    def changes(self, patch: Patch) -> dict[str, Change]:
        """Return the changes of a patch, each tensor once. Raise WeightsError when it does not fit this model."""
        self._refuse_unknown(patch.changes)
        given = self._once(patch.changes, _same)
        for name, change in given.items():
            self._check_dtype(name, change.value_K)
            size = torch.Size(self.shapes[name]).numel()
            index_K = change.index_K
            count = size if index_K is None else len(index_K)
            inside = index_K is None or not count or (int(index_K[0]) >= 0 and int(index_K[-1]) < size)
            if change.value_K.numel() != count or not inside:
                raise WeightsError(f"the changes of {name} do not fit into its {size} weights", "is it the same size?")
        return given

    def _refuse_unknown(self, names: Iterable[str]) -> None:
        unknown = sorted(set(names) - set(self.aliases))
        if unknown:
            raise WeightsError(f"weights not in the model: {_some(unknown)}", "is it the same architecture?")

    def _once(self, given: Mapping[str, _T], same: Callable[[_T, _T], bool]) -> dict[str, _T]:
        once: dict[str, _T] = {}
        for name, value in given.items():
            first = self.aliases[name]
            if first in once and not same(once[first], value):
                raise WeightsError(f"{first} and {name} are tied in the model but differ", "untie the model")
            once[first] = value
        return once

    def _check_dtype(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype != DTYPES[self.dtype]:
            raise WeightsError(
                f"{name} is {tensor.dtype}, the model {DTYPES[self.dtype]}", "publish weights in the engine's dtype"
            )


def model_facts(name: str, dtype: Dtype) -> ModelFacts:
    """Read the facts from the model's configuration; no weight is read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = model_folder(name)
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a damaged file makes the libraries raise anything
        raise ConfigError(
            f"cannot read the configuration of {name}: {error}", "the folder must hold a config.json"
        ) from error
    groups: dict[int, list[str]] = defaultdict(list)
    tensors = model.state_dict(keep_vars=True)
    for key, tensor in tensors.items():
        groups[id(tensor)].append(key)
    aliases = {key: keys[0] for keys in groups.values() for key in keys}
    once = {key: tensors[key].detach() for key in dict.fromkeys(aliases.values())}
    shapes = {key: tuple(tensor.shape) for key, tensor in once.items()}
    routers = {id(router) for router in routers_of(model)}
    layers = tuple(_layer(name) for name, module in model.named_modules() if id(module) in routers)
    pieces = _pieces(model, once)
    head = model.get_output_embeddings()
    linears = tuple(
        name for name, module in model.named_modules() if type(module) is torch.nn.Linear and module is not head
    )
    return ModelFacts(folder, dtype, config.get_text_config().vocab_size, shapes, aliases, layers, pieces, linears)


class _CopiesShare(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets copies of tensors without data share their storage: it tells which part of which tensor a copy is."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.clone.default:
            return args[0]
        if function is torch.ops.aten._unsafe_view.default:  # of a copy in another order, which was not made
            return args[0].new_empty(args[1])
        return function(*args, **(kwargs or {}))


def _pieces(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Piece]]:
    """Return the pieces of each tensor that checkpoints have under other names."""
    from transformers.core_model_loading import revert_weight_conversion

    with _CopiesShare():  # type: ignore[no-untyped-call]
        saved = revert_weight_conversion(model, dict(tensors))
    names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for key, tensor in saved.items():
        name = names.get(tensor.untyped_storage()._cdata, key)
        if name != key:
            pieces[name].append(Piece(key, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()))
    return {name: of for name, of in pieces.items() if sum(prod(one.size) for one in of) == tensors[name].numel()}


def _layer(name: str) -> int:
    """Return the number of the layer in a module's name."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def _same(left: Change, right: Change) -> bool:
    if left.index_K is None or right.index_K is None:
        return left.index_K is right.index_K and torch.equal(left.value_K, right.value_K)
    return torch.equal(left.index_K, right.index_K) and torch.equal(left.value_K, right.value_K)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# ------------------------------------------------------------ in a server's workers


class Tainted(WeightsError):
    """Weights were written, and are not what they should be: the engine samples nothing until whole ones come."""


def check_layout(model: ModelFacts, answers: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if a weight cannot be found in the server, or if the server has one that is not published."""
    for name, shape in model.shapes.items():
        parts = {tuple(map(_frozen, part)) for answer in answers for part in answer["spread"][name]}
        if sum(prod(size) for _, size, _ in parts) != prod(shape):
            raise ConfigError(f"the server's loader does not copy {name} as it is, but makes something of it", _HINT)
    for answer in answers:
        for what, why in (
            ("other_dtype", f"the server does not hold them in {model.dtype}"),
            ("unaligned", "their shards cannot be verified"),
            ("uncovered", "the server has them, the published weights do not"),
        ):
            if answer[what]:
                raise ConfigError(f"{', '.join(answer[what][:4])}: {why}", _HINT)


def split_tensors(model: ModelFacts, answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tensors of which some rank holds only a part."""
    return [
        name
        for name, shape in model.shapes.items()
        if any(
            sum(prod(size) for _, size, _ in {tuple(map(_frozen, part)) for part in answer["spread"][name]})
            < prod(shape)
            for answer in answers
        )
    ]


def verify(model: ModelFacts, expected: Mapping[str, int], answers: Sequence[Mapping[str, Any]]) -> None:
    """Raise Tainted if the parts of a tensor in the workers have another fingerprint than the published tensor."""
    for name, published in expected.items():
        sums: dict[Any, int] = {}
        for answer in answers:
            for offset, size, stride, found in answer[name]:
                key, value = (offset, tuple(size), tuple(stride)), int(found, 16)
                if sums.setdefault(key, value) != value:
                    raise _wrong(name, "its ranks hold different weights")
        if sum(sums.values()) % 2**64 != published:
            raise _wrong(name, "its fingerprint differs")


def _wrong(name: str, why: str) -> Tainted:
    return Tainted(f"the server does not hold the {name} that was published: {why}", "load the whole weights")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# ------------------------------------------------------------ updates


class Update(ABC):
    """New weights for a server, checked and prepared; nothing has changed yet. `seconds` are the times of the parts of
    `apply` in the slowest worker."""

    seconds: Mapping[str, float] = {}

    async def get_ready(self) -> None:  # noqa: B027 - most updates have nothing to do
        """Do what can be done while the server samples with the old weights."""

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
    return Laid(*written(tensors), "rillflow_load", fingerprints)


def lay_changes(changes: Mapping[str, Change], fingerprints: Mapping[str, int]) -> Laid:
    """Write the changes; tensors without a change are left out."""
    changes = {name: change for name, change in changes.items() if change.value_K.numel()}
    expected = {name: value for name, value in fingerprints.items() if name in changes}
    return Laid(*written(dict(_entries(changes))), "rillflow_patch", expected)


def _entries(changes: Mapping[str, Change]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (index_K, value_K) in changes.items():
        yield f"{name}:value", value_K.reshape(-1)
        if index_K is not None:
            small = int(index_K[-1]) < 2**31
            yield f"{name}:index", index_K.to(torch.int32) if small else index_K


def written(tensors: Mapping[str, torch.Tensor], stem: str = "model") -> tuple[Path, list[IO[bytes]]]:
    """Write safetensors files into a new folder, in memory where it has room. Return the folder and the open files."""
    _sweep()
    size = sum(tensor.nbytes for tensor in tensors.values())
    memory = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size
    folder = Path(tempfile.mkdtemp(prefix=f"rillflow-{os.getpid()}-", dir=_SHARED_MEMORY if memory else None))
    files: list[IO[bytes]] = []
    try:
        for name, pieces in codec.encode(tensors, stem):
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
    """Published deltas that the workers decode, `ahead` if they can do so while they sample. WeightsError when they are
    not deltas of this model's weights."""

    def __init__(self, model: ModelFacts, deltas: Deltas, rewrite: Rewrite, *, ahead: bool = False) -> None:
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

        self._ahead = ahead

    async def get_ready(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_READY_SECONDS):
                while self._ahead:
                    if all(await self._rewrite("rillflow_prepare", self._steps)):
                        return
                    await asyncio.sleep(_LOOK_SECONDS)

    async def apply(self) -> None:
        await self._call("rillflow_decode", self._steps)

    async def close(self) -> None:
        """Do nothing: the files belong to the puller."""
