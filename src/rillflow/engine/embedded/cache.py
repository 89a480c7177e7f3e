"""Slots of KV cache: one preallocated tensor, never concatenated, and reallocated only after it was freed.

Invariants: slot s holds keys and values of one sequence in columns 0..n-1; the last column belongs to no sequence,
it takes the writes of padding. Every value is finite (stale columns are masked, and 0 * NaN would not be 0).

Shape suffixes: L layers, S slots, K kv heads, C columns (context + 1), D head size, N tokens, R rows, T tokens of a
row, E columns read (the extent).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil
import torch

from rillflow import kernels
from rillflow.engine.embedded.sampling import Array
from rillflow.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Stretch(NamedTuple):
    """Neighbouring rows of a decode step that are read together; none of them has more than `extent` columns."""

    rows: slice
    extent: int


class Columns(NamedTuple):
    """The columns of a decode step's rows, for compiled attention: the one for the new key and value of each row, and
    how many columns it reads."""

    write_R: Array
    length_R: Array


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward: R rows of T new tokens each, right-padded.

    `rows` are the slots read, as a slice (a view, no copy) or as indices (a gather). `mask_RTE` is additive, None
    when nothing is cached yet: then the new tokens attend causally to one another alone. `last_R` is the index, in
    the flattened tokens, of each row's last real token; None when every row has exactly one. `stretches` are the rows
    that a decode step reads together, with their mask. A decode step for compiled attention has `columns` instead, and
    neither a mask nor an index to write by. A batch without any of these stores nothing.
    """

    ids_RT: torch.Tensor
    positions_RT: torch.Tensor
    rows: slice | torch.Tensor
    write_N2K: torch.Tensor | None
    extent: int
    mask_RTE: torch.Tensor | None
    last_R: torch.Tensor | None
    stretches: Sequence[tuple[Stretch, torch.Tensor]] = ()
    columns: Columns | None = None


# On a GPU, kernels are chosen and planned per shape, which costs more than the kernel itself when the shape is new in
# every step. Rounded shapes repeat. On a CPU a row more is a row more to compute.
_GRAIN = {"cpu": 1, "cuda": 16}
# On a CPU, how many numbers of keys attention reads in the time that one more call takes (measured: 20 microseconds).
_CALL = 15_000
_WINDOWS = ("window", "window_size", "window_len")  # how configs name a number of tokens that attention sees


class KVCache:
    """The tensor and the moves on it. `write` and `read` are what a forward calls, layer by layer."""

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        heads: int,
        context: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
    ) -> None:
        self.context = context
        self.window = window  # how many of the latest tokens attention sees; None: all
        self.slots = slots
        self.heads = heads
        self.device = device
        self.compiled = False  # whether decode steps are for compiled attention; set by a forward that has it
        plain = device.type == "cpu" and dtype == torch.float32 and window is None
        # The compiled loop has one thread; where torch has several, its operators share the work among them.
        self.compiles = plain and torch.get_num_threads() == 1 and kernels.enabled("decode")
        self._grain = _GRAIN[device.type]
        self._call = _CALL // (heads * head_size)
        self._shape = (layers, 2, slots, heads, context + 1, head_size)
        self._take(torch.zeros(self._shape, dtype=dtype, device=device))
        # Offsets of (key or value, head) for a slot, in units of head_size.
        half = slots * heads * (context + 1)
        self._offset_2K = np.add.outer(np.arange(2) * half, np.arange(heads) * (context + 1)).reshape(-1)
        self._columns_C = torch.arange(context, device=device)
        self._zero = torch.zeros((), dtype=dtype, device=device)
        self._closed = torch.full((), -torch.inf, dtype=dtype, device=device)

    def write(self, layer: int, batch: Batch, kv_ND: torch.Tensor) -> None:
        """Store keys and values, ordered (token, key or value, head)."""
        assert batch.write_N2K is not None, "compiled attention stores for itself"
        self._flat_LND[layer].index_copy_(0, batch.write_N2K, kv_ND)

    def read(self, layer: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, K, E, D] of the batch's rows, its own tokens included."""
        return self.read_rows(layer, batch.rows, batch.extent)

    def read_rows(self, layer: int, rows: slice | torch.Tensor, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv_2RKED = self._kv_L2SKCD[layer, :, rows, :, :extent]
        return kv_2RKED[0], kv_2RKED[1]

    def arrays(self, layer: int) -> tuple[Array, Array]:
        """Return the layer's keys and values [S, K, C, D], for compiled attention."""
        return self._arrays[layer]

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` columns of one slot to another, in all layers at once."""
        self._kv_L2SKCD[:, :, target, :, :count].copy_(self._kv_L2SKCD[:, :, source, :, :count])

    def swap(self, one: int, other: int, count: int) -> None:
        """Exchange the first `count` columns of two slots."""
        kept = self._kv_L2SKCD[:, :, one, :, :count].clone()
        self.copy(other, one, count)
        self._kv_L2SKCD[:, :, other, :, :count].copy_(kept)

    def clear(self) -> None:
        """Fill it with zeros; allocate it again if it was freed."""
        if self.bytes:
            self._kv_L2SKCD.zero_()
        else:
            self._take(self._kv_L2SKCD.new_zeros(self._shape))

    def free(self) -> None:
        """Release the memory, with everything cached; nothing is written or read before the next `clear`."""
        layers, _, *rest = self._shape
        self._take(self._kv_L2SKCD.new_empty((layers, 0, *rest)))

    @property
    def bytes(self) -> int:
        """Memory that is allocated now."""
        return self._kv_L2SKCD.nbytes

    def _take(self, memory: torch.Tensor) -> None:
        layers, *_, head_size = memory.shape
        self._kv_L2SKCD = memory
        self._flat_LND = memory.view(layers, memory.numel() // (layers * head_size), head_size)
        held = memory.numel() and self.compiles
        self._arrays = [(layer[0].numpy(), layer[1].numpy()) for layer in memory] if held else []

    def decode_batch(self, ids_R: Array, positions_R: Array, ready_R: Array) -> Batch:
        """One new token for each of the first slots. Rows that are not ready write into the spare column."""
        columns_R = np.where(ready_R, positions_R, self.context)
        positions_R = positions_R.astype(np.int64)
        batch = Batch(
            ids_RT=self._tensor(ids_R.astype(np.int64)[:, None]),
            positions_RT=self._tensor(positions_R[:, None]),
            rows=slice(0, len(ids_R)),
            write_N2K=None,
            extent=min(self._rounded(int(positions_R.max()) + 1), self.context),
            mask_RTE=None,
            last_R=None,
        )
        if self.compiled:
            return replace(batch, columns=Columns(columns_R.astype(np.int64), positions_R + 1))
        mask_RTE = self.mask(batch.positions_RT, batch.extent)
        return replace(
            batch,
            write_N2K=self._write_index(np.arange(len(ids_R)), columns_R),
            mask_RTE=mask_RTE,
            # Masks are cut once a step, not once a layer.
            stretches=[
                (one, mask_RTE[one.rows, None, :, : one.extent]) for one in self._stretches(positions_R, batch.extent)
            ],
        )

    def _stretches(self, positions_R: Array, extent: int) -> list[Stretch]:
        if self.device.type != "cpu":  # a call costs more there than what it reads
            return [Stretch(slice(0, len(positions_R)), extent)]
        return stretches((positions_R + 1).tolist(), self._call)

    def prefill_batch(self, slots_R: Array, ids_RT: Array, starts_R: Array, counts_R: Array) -> Batch:
        """`counts_R` new tokens for each slot, from column `starts_R` on."""
        rows, width = ids_RT.shape
        steps_T = np.arange(width)
        positions_RT = starts_R[:, None] + steps_T
        real_RT = steps_T < counts_R[:, None]
        columns_RT = np.where(real_RT, positions_RT, self.context)
        positions_RT = np.where(real_RT, positions_RT, 0)  # a padded token needs some valid position
        extent = int((starts_R + counts_R).max())
        positions = self._tensor(positions_RT.astype(np.int64))
        fresh = not starts_R.any()
        return Batch(
            ids_RT=self._tensor(ids_RT.astype(np.int64)),
            positions_RT=positions,
            rows=self._tensor(slots_R.astype(np.int64)),
            write_N2K=self._write_index(np.repeat(slots_R, width), columns_RT.reshape(-1)),
            extent=extent,
            mask_RTE=None if fresh else self.mask(positions, extent),
            last_R=self._tensor((np.arange(rows) * width + counts_R - 1).astype(np.int64)),
        )

    def rows(self, count: int) -> int:
        """Return how many rows are decoded in order to decode the first `count`."""
        return min(self._rounded(count), self.slots)

    def _rounded(self, count: int) -> int:
        return -(-count // self._grain) * self._grain

    def _write_index(self, slots_N: Array, columns_N: Array) -> torch.Tensor:
        base_N = slots_N * (self.heads * (self.context + 1)) + columns_N
        return self._tensor(np.add.outer(base_N, self._offset_2K).reshape(-1).astype(np.int64))

    def mask(self, positions_RT: torch.Tensor, extent: int, window: int | None = None) -> torch.Tensor:
        """Return an additive mask, computed once a step: SDPA would turn a bool mask into this in every layer. It is
        that of all layers, or that of those with this window."""
        window = window or self.window
        open_RTE = self._columns_C[:extent] <= positions_RT[:, :, None]
        if window is not None:
            open_RTE &= self._columns_C[:extent] > positions_RT[:, :, None] - window
        return torch.where(open_RTE, self._zero, self._closed)

    def _tensor(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def stretches(extents: Iterable[int], call: int) -> list[Stretch]:
    """Return the rows of a decode step in stretches, each read up to its own longest row.

    One call over all rows would read every row as far as the longest goes, and most of that is masked where lengths
    differ; a call for each row costs a dispatch. `call` is how many columns can be read in the time that a call takes:
    a stretch ends where the columns saved are worth more. One walk over the rows: the rows after the longest of a
    stretch are its tail, and the tail becomes a stretch as soon as that pays.
    """
    made: list[Stretch] = []
    first = tail = row = 0
    longest = longest_of_tail = 0
    for row, extent in enumerate(extents):
        if extent > longest:
            if (row - first) * (extent - longest) > call:
                made.append(Stretch(slice(first, row), longest))
                first = row
            longest, tail, longest_of_tail = extent, row + 1, 0
            continue
        longest_of_tail = max(longest_of_tail, extent)
        if (row + 1 - tail) * (longest - longest_of_tail) > call:
            made.append(Stretch(slice(first, tail), longest))
            first, longest, tail, longest_of_tail = tail, longest_of_tail, row + 1, 0
    if longest:
        made.append(Stretch(slice(first, row + 1), longest))
    return made


def make_cache(model: PreTrainedModel, slots: int, context: int) -> KVCache:
    """Return a cache for sequences of `context` tokens. Raise EngineError where the model has fewer positions, or where
    the memory of its device has no room for it."""
    config = model.config
    longest = getattr(config, "max_position_embeddings", None) or context
    if context > longest:
        raise EngineError(
            f"context {context} is longer than the model's {longest}", f"set the context to {longest} or less"
        )
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    slot_bytes = 2 * config.num_hidden_layers * heads * (context + 1) * head_size * model.dtype.itemsize
    _check_room(slots, context, slot_bytes, model.device)
    return KVCache(
        layers=config.num_hidden_layers,
        slots=slots,
        heads=heads,
        context=context,
        head_size=head_size,
        dtype=model.dtype,
        device=model.device,
        window=_window(config, context),
    )


def _check_room(slots: int, context: int, slot_bytes: int, device: torch.device) -> None:
    needed, free = slots * slot_bytes, free_bytes(device)
    if needed > free:
        fitting = f"{free // slot_bytes} slots of {context} tokens fit" if free >= slot_bytes else "not one slot fits"
        raise EngineError(
            f"a KV cache of {slots} slots (engine.slots) of {context} tokens (engine.context) needs "
            f"{needed / 2**30:.1f} GiB, and {device.type} has {free / 2**30:.1f} GiB free",
            f"lower engine.slots or engine.context ({fitting}), or use engine.kind vllm or sglang, which page it",
        )


def free_bytes(device: torch.device) -> int:
    """Return how much memory of a device can be allocated now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _window(config: PreTrainedConfig, context: int) -> int | None:
    """Return the sliding window of all layers if sequences can be longer than it. Models whose layers differ name the
    kind of each. Raise EngineError for a shorter window under another name: it is not computed here."""
    for name, value in config.to_dict().items():
        if name != "sliding_window" and name.endswith(_WINDOWS) and type(value) is int and 0 < value < context:
            raise EngineError(
                f"the embedded engine cannot run {type(config).__name__} with {context} tokens: its attention has a "
                f"window ({name} {value})",
                f"set engine.context to {value} or less, or use another engine",
            )
    if getattr(config, "layer_types", None) is not None or not getattr(config, "use_sliding_window", True):
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window if window is not None and window < context else None
