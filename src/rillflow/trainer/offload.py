"""Offloads what a device does not need for a while: the optimizer's state while a worker samples
(`OffloadingGenerator`), and with `trainer.offload` the moments between updates (`Moments`) and the inputs of layers
between forward and backward (`offloaded_input`).

State on a GPU goes to host memory. State on a CPU goes to a memory-mapped file of which no page stays resident; the
operating system keeps pages only while the memory is free. The file has no name, so a kill leaves nothing.

Invariants: the restored state has exactly the bits of the offloaded one; it is not read between the two.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from rillflow.contracts import Generator
from rillflow.errors import ConfigError
from rillflow.storage import disk_errors

if TYPE_CHECKING:
    from rillflow.config import TrainerConfig
    from rillflow.contracts import Tensors
    from rillflow.types import Probe

_ALIGNED = 64


def check_offload(config: TrainerConfig, device: torch.device) -> None:
    """Refuse `trainer.offload` where everything is in host memory anyway."""
    if config.offload != "none" and device.type == "cpu":
        raise ConfigError(
            f"trainer.offload: {config.offload} moves memory from a GPU to its host, and the trainer runs on the CPU",
            "remove it, or set trainer.device: cuda",
        )


# ---------------------------------------------------------------- while a worker samples


class HasState(Protocol):
    """The method of `optimizer.Optimizer` that is used here."""

    def idle(self) -> list[torch.Tensor]:
        """Return the tensors that only an update needs; always the same objects once they exist."""


class OffloadingGenerator:
    """A `contracts.Generator` that offloads the optimizers' state from each `begin` to the next `end`.

    The engine gets its weights first, because they may be made from the offloaded state.
    """

    def __init__(self, generator: Generator, optimizers: Sequence[HasState], folder: Path) -> None:
        self._generator = generator
        self._offload = Offload(lambda: [tensor for optimizer in optimizers for tensor in optimizer.idle()], folder)

    @property
    def bytes(self) -> int:
        """Return the bytes that are offloaded now."""
        return self._offload.bytes

    def begin(self, tensors: Tensors, version: int, probe: Probe | None = None) -> None:
        self._generator.begin(tensors, version, probe)
        self._offload.put()

    def end(self) -> None:
        try:
            self._generator.end()
        finally:
            self._offload.restore()


class Offload:
    """Moves tensors away and back. Each `put` asks for `tensors`: an optimizer has no moments before its first
    update."""

    def __init__(self, tensors: Callable[[], list[torch.Tensor]], folder: Path) -> None:
        self._tensors = tensors
        self._folder = folder
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # each tensor with the copy of its values
        self._pinned: dict[int, torch.Tensor] = {}
        self._file: _MappedFile | None = None

    @property
    def bytes(self) -> int:
        return sum(values.nbytes for _, values in self._kept)

    def put(self) -> None:
        """Offload the tensors, unless they are already."""
        if self._kept:
            return
        tensors = self._tensors()
        self._kept = [*self._to_host(tensors), *self._to_file(tensors)]
        for tensor, _ in self._kept:
            tensor.data = tensor.new_empty(0)
        if self._file is not None:
            _trim()

    def values(self) -> Mapping[int, torch.Tensor]:
        """Return the values of the offloaded tensors, by `id`."""
        return {id(tensor): values for tensor, values in self._kept}

    def drop(self) -> None:
        """Forget the offloaded values, whose tensors are no longer used."""
        self._kept.clear()
        self._pinned.clear()

    def restore(self) -> None:
        for tensor, values in self._kept:
            # A copy: a mapped tensor would be read from the file again and again.
            tensor.data = values.to(tensor.device, copy=True)
        self._kept.clear()
        if self._file is not None:
            self._file.release()

    def _to_host(self, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        moved = []
        for tensor in tensors:
            if tensor.device.type == "cpu":
                continue
            if id(tensor) not in self._pinned:
                self._pinned[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host = self._pinned[id(tensor)]
            host.copy_(tensor, non_blocking=True)
            moved.append((tensor, host))
        if moved:
            torch.accelerator.synchronize()
        return moved

    def _to_file(self, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        own = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.numel()]
        if not own:
            return []
        size = sum(_padded(tensor.nbytes) for tensor in own)
        if self._file is None or self._file.size != size:
            self._file = _MappedFile(self._folder, size)
        moved, at = [], 0
        for tensor in own:
            values = self._file.part(at, tensor)
            values.copy_(tensor)
            moved.append((tensor, values))
            at += _padded(tensor.nbytes)
        self._file.release()
        return moved


# ---------------------------------------------------------------- trainer.offload


class Moments:
    """Keeps moments off the device. Only during the step of a rule are its own moments there."""

    def __init__(
        self,
        rules: Sequence[torch.optim.Optimizer],
        moments_of: Callable[[torch.optim.Optimizer], list[torch.Tensor]],
        folder: Path | None = None,
    ) -> None:
        folder = folder or Path(tempfile.gettempdir())
        self._of = {id(rule): Offload(lambda rule=rule: moments_of(rule), folder) for rule in rules}  # type: ignore[misc]

    @contextmanager
    def here(self, rule: torch.optim.Optimizer) -> Iterator[None]:
        offload = self._of[id(rule)]
        offload.restore()
        try:
            yield
        finally:
            offload.put()

    def replaced(self, rule: torch.optim.Optimizer) -> None:
        """Put away the moments that a rule has loaded in place of its own."""
        offload = self._of[id(rule)]
        offload.drop()
        offload.put()

    def values(self) -> dict[int, torch.Tensor]:
        """Return the values of all moments that are away, by the `id` of their tensor."""
        return {key: values for offload in self._of.values() for key, values in offload.values().items()}


def offloaded_input(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's forward that saves its input, the hidden states, in host memory until backward. Layers that are
    recomputed save little else."""

    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        saved = hidden.untyped_storage().data_ptr()

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() != saved:
                return tensor
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            return tensor.device, host.copy_(tensor, non_blocking=True)

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            device, host = packed
            back: torch.Tensor = host.to(device, non_blocking=True)
            return back

        with saved_tensors_hooks(pack, unpack):
            return forward(hidden, *args, **kwargs)

    return run


# ---------------------------------------------------------------- files


class _MappedFile:
    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        with disk_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
            # Allocate all blocks now: a full disk under a mapped file would end the process later.
            _allocate(file.fileno(), size)
            self._memory = mmap.mmap(file.fileno(), size)

    def part(self, at: int, like: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=at).view(like.shape)

    def release(self) -> None:
        """Drop all resident pages; their content is in the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)


def _trim() -> None:
    """Return freed memory to the operating system; the C library would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _allocate(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
