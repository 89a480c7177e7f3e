"""The kernels write deltas that the host and servers' workers read, bit for bit."""

# ruff: noqa: E402 (the kernels are imported after `require("triton")`)
from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
import torch

from needs import require
from rillflow.contracts import Change
from rillflow.engine.servers.inside.rillflow_delta import Piece, apply_all
from rillflow.errors import CorruptData
from rillflow.kernels.delta.format import CODED, RAW, SAME, opened, segments
from rillflow.weights import delta, delta_file, previous
from rillflow.weights.delta_file import Part
from rillflow.weights.fingerprint import fingerprint

require("triton")

from rillflow.kernels.delta import gpu
from rillflow.kernels.delta.gpu import batch
from rillflow.kernels.delta.gpu import encode as writer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# In the interpreter each of these takes many seconds.
pytestmark = [] if DEVICE == "cuda" else [pytest.mark.slow]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bits(tensor: torch.Tensor) -> bytes:
    kind = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return tensor.cpu().contiguous().reshape(-1).view(kind).numpy().tobytes()


def pair(count: int, share: float, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and what some of them become; among them a NaN, infinities, a denormal and -0."""
    source = torch.Generator().manual_seed(count)
    base = (0.02 * torch.randn(count, generator=source)).to(dtype)
    step = 1 + 0.02 * torch.randn(count, generator=source)
    new = torch.where(torch.rand(count, generator=source) < share, (base * step).to(dtype), base)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-40, -0.0]).to(dtype)
    if share and count > 10:
        new[:5], base[5:10] = special, special
    return base, new


def applied(base: torch.Tensor, change: Change) -> torch.Tensor:
    if change.index_K is None:
        return change.value_K.view(base.shape)
    new = base.clone()
    new.view(-1)[change.index_K] = change.value_K
    return new


def exchange(base: torch.Tensor, new: torch.Tensor) -> None:
    there, theirs = base.to(DEVICE), delta.encode(base, new)
    ours = gpu.encode_gpu(there, new.to(DEVICE))
    assert ours[1:] == theirs[1:]
    assert bits(delta.apply(base, ours.data)) == bits(new)
    for data in (ours.data, theirs.data):
        held = there.clone()
        apply_all([Piece(held, memoryview(data))])
        assert bits(held) == bits(new)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.02, 0.6])
def test_host_and_device_read_each_other(dtype: torch.dtype, share: float) -> None:
    exchange(*pair(5003, share, dtype))


def test_many_tensors_at_once() -> None:
    pairs = [pair(4999, 0.05), pair(0, 0.0), pair(1, 1.0), pair(300, 0.0), pair(64, 0.5, torch.float32)]
    there = [(base.to(DEVICE), new.to(DEVICE)) for base, new in pairs]
    known = [fingerprint(base) for base, _ in pairs]
    made = gpu.encode_many(there, known)
    assert [one[1:] for one in made] == [delta.encode(base, new)[1:] for base, new in pairs]
    assert [bits(delta.apply(base, one.data)) for (base, _), one in zip(pairs, made, strict=True)] == [
        bits(new) for _, new in pairs
    ]
    assert gpu.encode_many([]) == []


def test_segments_that_have_a_batch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unchanged, coded and raw segments, several of one tensor; the deltas are sealed by another thread."""
    monkeypatch.setattr(writer, "MOST_LOG2", 12)
    monkeypatch.setattr(writer, "_BUDGET", 1)
    monkeypatch.setattr(batch, "_MANY", 0)
    base, new = pair(9000, 0.05)
    new[:4096] = base[:4096]
    noise = torch.from_numpy(np.random.default_rng(0).integers(-(2**15), 2**15, 4200).astype(np.int16))
    pairs = [(base, new), (base[:4200], noise.view(torch.bfloat16)), pair(40, 0.0), pair(4097, 0.02)]
    pairs[3][1][4096] = pairs[3][0][4096]
    there = [(old.clone().to(DEVICE), to.to(DEVICE)) for old, to in pairs]
    known = [fingerprint(old) for old, _ in pairs]
    made = gpu.encode_many(there, known)
    assert [one[1:] for one in made] == [delta.encode(old, to)[1:] for old, to in pairs]
    kinds = [[kind for kind, _ in segments(*opened(one.data))] for one in made]
    assert kinds == [[SAME, CODED, CODED], [RAW, RAW], [SAME], [CODED, SAME]]
    for (old, to), one in zip(pairs, made, strict=True):
        assert bits(delta.apply(old, one.data)) == bits(to)
    apply_all(Piece(old, memoryview(one.data)) for (old, _), one in zip(there, made, strict=True))
    assert [bits(old) for old, _ in there] == [bits(to) for _, to in pairs]


@pytest.mark.parametrize("budget", [1 << 25, 40])
def test_more_records_than_there_was_room_for(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is made again, as a whole or in halves, and nothing of the first attempt is left in the deltas."""
    monkeypatch.setattr(writer, "MOST_LOG2", 9)
    pairs = [pair(1200, 0.1), pair(300, 0.9), pair(40, 0.0)]
    there = [(base.to(DEVICE), new.to(DEVICE)) for base, new in pairs]
    made = gpu.encode_many(there)
    monkeypatch.setattr(writer, "_BUDGET", budget)
    monkeypatch.setattr(writer, "batches", lambda costs, budget: [slice(0, len(costs))])
    monkeypatch.setattr(writer, "_room", lambda estimates: 7)
    assert gpu.encode_many(there) == made
    assert [one[1:] for one in made] == [delta.encode(base, new)[1:] for base, new in pairs]
    # The deltas of one batch are read-only views of the memory into which it was copied.
    assert all(isinstance(one.data, memoryview) and one.data.readonly for one in made)


def test_more_has_changed_than_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call sizes its memory by the changes of the call before; the deltas are the same if more has changed."""
    monkeypatch.setattr(writer, "_seen", {})
    monkeypatch.setattr(writer, "_ROOM", 8)
    few, many = pair(5000, 0.001), pair(5000, 0.3)
    there = [[tensor.to(DEVICE) for tensor in one] for one in (many, few)]
    first = [gpu.encode_gpu(*one) for one in there]
    assert writer._seen, "what a call has seen is known to the next one"
    assert [gpu.encode_gpu(*one) for one in there] == first
    assert [one[1:] for one in first] == [delta.encode(*one)[1:] for one in (many, few)]


def test_segments_and_batches_of_tensors() -> None:
    weights = [9000, 0, 4096, 1, 4097]
    spans = batch.spans(np.array(weights), np.array([12, 12, 12, 22, 13]))
    assert spans.tensor.tolist() == [0, 0, 0, 2, 3, 4]
    assert spans.start.tolist() == [0, 4096, 8192, 0, 0, 0]
    assert spans.weights.tolist() == [4096, 4096, 808, 4096, 1, 4097]
    assert [run.tolist() for run in spans.runs()] == [[0, 3, 4, 5], [3, 4, 5, 6]]
    assert [run.tolist() for run in spans.part(slice(1, 4)).runs()] == [[0, 2], [2, 3]]
    assert batch.batches(np.array([3, 9, 1, 1, 2]), 4) == [slice(0, 1), slice(1, 2), slice(2, 5)]
    assert batch.batches(np.array([], np.int64), 4) == []


def test_runs_at_once_are_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer publishes like this from a GPU: small tensors joined, several runs in a call."""
    monkeypatch.setattr(previous, "_alike", lambda one, other: True)
    monkeypatch.setattr(delta_file, "RUN", 3000)
    monkeypatch.setattr(delta_file, "_room", lambda like, weights: torch.empty(weights, dtype=like.dtype))
    pairs = {f"t{n}": pair(count, 0.05) for n, count in enumerate((1200, 700, 4000, 900, 16, 2400))}
    old, new = ({Part(name, 0, len(p[k])): p[k].to(DEVICE) for name, p in pairs.items()} for k in (0, 1))
    held = previous.Previous()
    held.hold(old, {}, 1, previous.sums_of(old))
    found = held.difference(new, math.inf)
    assert found is not None
    assert found.sums == previous.sums_of(new)
    assert [len(piece.parts) for piece in found.pieces] == [2, 1, 2, 1]
    tensors = {part.tensor: tensor.cpu() for part, tensor in old.items()}
    for piece in found.pieces:
        for name, change in delta_file.changes_of(piece, tensors).items():
            assert bits(applied(tensors[name], change)) == bits(pairs[name][1])


def test_tensors_that_are_not_one_run_of_aligned_words() -> None:
    base, new = pair(2 * 999, 0.1)
    across, odd = base.view(2, 999).to(DEVICE).T, base.to(DEVICE)[3:1000]
    for there, to in ((across, new.view(2, 999).T), (odd, new[3:1000])):
        made = gpu.encode_gpu(there, to.to(DEVICE))
        assert bits(delta.apply(there.cpu(), made.data)) == bits(to)


def test_fingerprints_are_those_of_the_host() -> None:
    base, _ = pair(5003, 0.0)
    there = base.to(DEVICE)
    assert gpu.fingerprint_gpu(there) == fingerprint(base)
    parts = gpu.fingerprint_gpu(there[:4000]) + gpu.fingerprint_gpu(there[4000:], 1000)
    assert parts % 2**64 == fingerprint(base)


@pytest.mark.parametrize("count", [3, 5])
def test_classes_of_which_all_or_most_weights_change(count: int) -> None:
    """If all weights of a class change, no position is coded; if most do, the unchanged ones are."""
    source = torch.Generator().manual_seed(count)
    exponents = torch.randint(100, 100 + count, (9000,), generator=source).to(torch.int16)
    base = (exponents << 7 | torch.randint(0, 128, (9000,), generator=source).to(torch.int16)).view(torch.bfloat16)
    chosen = torch.rand(9000, generator=source) < (exponents - 100) / (count - 1)
    new = torch.where(chosen, base.view(torch.int16) ^ 1, base.view(torch.int16)).view(torch.bfloat16)
    table = next(bytes(body) for _, body in segments(*opened(delta.encode(base, new).data)))
    assert table[0] >= 2, "there are several classes"
    exchange(base, new)


def test_arrays_in_one_piece_of_memory() -> None:
    """They do not overlap, begin where kernels want them to, and keep the memory; the memory keeps none of them."""
    made = batch.Room(torch.device(DEVICE))
    pieces = [made.ints(3), made.bytes(300), made.longs(2), made.numbers(5, 16), made.ints(0)]
    made.make()
    for number, piece in enumerate(pieces):
        piece.tensor.fill_(number)
    assert [piece.tensor.tolist() for piece in pieces] == [[0] * 3, [1] * 300, [2] * 2, [3] * 5, []]
    assert all(piece.begin % 256 == 0 for piece in pieces)
    assert pieces[1].after(16).tensor.data_ptr() == pieces[1].tensor.data_ptr() + 16
    gone, kept = weakref.ref(made), pieces[2]
    del made, pieces, piece
    assert kept.tensor.tolist() == [2, 2]
    with pytest.raises(AssertionError):
        kept.after(1)
    del kept
    gc.collect()  # the exception holds a reference to the frame that raised it
    assert gone() is None, "the memory must be freed with its last array"


@pytest.mark.parametrize("least", [0, 1 << 30])
def test_work_that_is_done_by_others(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_MANY", least)
    later = [batch.Later(lambda number=number: 2 * number, 5) for number in (7, 100)]
    assert [one.wait() for one in later] == [14, 200]

    def fails() -> None:
        raise CorruptData("no", "")

    with pytest.raises(CorruptData):
        batch.Later(fails, 5).wait()


def test_who_raises_leaves_nothing_under_way() -> None:
    ended: list[int] = []

    class Ends:
        def wait(self) -> None:
            ended.append(1)

    def good() -> batch.Work:
        yield Ends()
        yield Ends()

    def bad() -> batch.Work:
        yield Ends()
        raise CorruptData("no", "")

    with pytest.raises(CorruptData):
        batch.in_turns([bad, good])
    assert len(ended) == 2
