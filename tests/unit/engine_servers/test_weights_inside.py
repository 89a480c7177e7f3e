"""The code that changes weights inside a server, on a model with vLLM's layout: fused projections, shards of two
ranks, a separate or a tied head, norms on every rank."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.contracts import Change
from rillflow.engine.servers import ModelFacts, Tainted, weights
from rillflow.engine.servers.inside.rillflow_places import Place, is_all, scatter, sums_of
from rillflow.engine.servers.inside.rillflow_weights import RillflowWorker
from rillflow.engine.servers.weights import check_layout, lay_changes, lay_whole, verify
from rillflow.errors import ConfigError
from rillflow.weights import codec
from rillflow.weights.fingerprint import fingerprint
from soak import repetitions

HIDDEN, HEADS, KEYS, VOCABULARY, PADDED = 16, 16, 8, 30, 32
SHAPES = {
    "embed.weight": (VOCABULARY, HIDDEN),
    "q.weight": (HEADS, HIDDEN),
    "k.weight": (KEYS, HIDDEN),
    "v.weight": (KEYS, HIDDEN),
    "o.weight": (HIDDEN, HEADS),
    "norm.weight": (HIDDEN,),
}


class Shard(torch.nn.Module):
    """One rank of two. Its loader does what vLLM's do."""

    def __init__(self, rank: int, dtype: torch.dtype, *, odd: str = "") -> None:
        super().__init__()
        self.rank, self.odd = rank, odd

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        self.embed = weight(PADDED // 2, HIDDEN)
        self.qkv = weight((HEADS + 2 * KEYS) // 2, HIDDEN)
        self.o = weight(HIDDEN, HEADS // 2)
        self.norm = weight(HIDDEN)
        if odd == "head":
            self.head = weight(VOCABULARY, HIDDEN)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name == "embed.weight":
                first = self.rank * PADDED // 2
                part = loaded.narrow(0, first, min(PADDED // 2, VOCABULARY - first))
                self.embed.data[: part.shape[0]].copy_(part)
                self.embed.data[part.shape[0] :].fill_(0)
            elif name in ("q.weight", "k.weight", "v.weight"):
                at, size = {
                    "q": (0, HEADS // 2),
                    "k": (HEADS // 2, KEYS // 2),
                    "v": (HEADS // 2 + KEYS // 2, KEYS // 2),
                }[name[0]]
                part = loaded.narrow(0, self.rank * size, size)
                self.qkv.data.narrow(0, at, size).copy_(part * 2 if self.odd == "scaled" else part)
            elif name == "o.weight":
                self.o.data.copy_(loaded.narrow(1, self.rank * HEADS // 2, HEADS // 2))
            else:
                self.norm.data.copy_(loaded)
                if self.odd == "composed":
                    self.norm.data.copy_(-torch.exp(self.norm))


class Ranks:
    """All workers of a server, as the adapter sees them."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, **odd: Any) -> None:
        self.workers = [RillflowWorker(), RillflowWorker()]
        for rank, worker in enumerate(self.workers):
            worker.model_runner = SimpleNamespace(model=Shard(rank, dtype, **odd))  # type: ignore[attr-defined]
        self.facts = ModelFacts(Path(), "bf16", VOCABULARY, SHAPES, {name: name for name in SHAPES})
        self._dtype = dtype

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(worker, method)(*arguments) for worker in self.workers]

    def learn(self) -> None:
        shapes = {name: list(shape) for name, shape in SHAPES.items()}
        check_layout(self.facts, self.call("rillflow_layout", shapes, str(self._dtype).removeprefix("torch.")))

    def take(self, laid: Any) -> None:
        answers = self.call(laid.method, sorted(map(str, laid.folder.iterdir())))
        laid.remove()
        verify(self.facts, laid.fingerprints, [answer["held"] for answer in answers])

    def expected(self, rank: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plain = Shard(rank, self._dtype)
        plain.load_weights(weights.items())
        return dict(plain.state_dict())

    def assert_holds(self, weights: dict[str, torch.Tensor]) -> None:
        for rank, worker in enumerate(self.workers):
            held = worker.model_runner.model.state_dict()  # type: ignore[attr-defined]
            for name, tensor in self.expected(rank, weights).items():
                assert torch.equal(held[name], tensor), name


def random_weights(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_learning_changes_nothing_and_loading_is_in_place(dtype: torch.dtype) -> None:
    ranks = Ranks(dtype)
    storages = [
        {name: tensor.data_ptr() for name, tensor in worker.model_runner.model.state_dict().items()}  # type: ignore[attr-defined]
        for worker in ranks.workers
    ]
    ranks.learn()
    ranks.assert_holds({name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()})
    weights = random_weights(dtype)
    ranks.take(lay_whole(weights))
    ranks.assert_holds(weights)
    for worker, before in zip(ranks.workers, storages, strict=True):
        after = worker.model_runner.model.state_dict()  # type: ignore[attr-defined]
        assert {name: tensor.data_ptr() for name, tensor in after.items()} == before


@settings(max_examples=repetitions(15, 40), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), dense=st.booleans())
def test_changes_reach_their_places_on_every_rank(seed: int, dense: bool) -> None:
    ranks = Ranks()
    ranks.learn()
    weights = random_weights()
    ranks.take(lay_whole(weights))
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for name, tensor in weights.items():
        count = int(torch.randint(0, tensor.numel() + 1, (), generator=generator))
        index_K = torch.randperm(tensor.numel(), generator=generator)[:count].sort().values
        if dense and count % 2:
            index_K = torch.arange(tensor.numel())
        value_K = torch.randn(len(index_K), generator=generator).bfloat16()
        tensor.view(-1)[index_K] = value_K
        changes[name] = Change(None if len(index_K) == tensor.numel() else index_K, value_K)
    ranks.take(lay_changes(changes, {name: fingerprint(weights[name]) for name in changes}))
    ranks.assert_holds(weights)


def test_one_wrong_value_on_one_rank_is_noticed() -> None:
    ranks = Ranks()
    ranks.learn()
    weights = random_weights()
    ranks.take(lay_whole(weights))
    ranks.workers[1].model_runner.model.qkv.data[3, 7] += 1  # type: ignore[attr-defined]
    value_K = weights["k.weight"].view(-1)[:1] + 1
    weights["k.weight"].view(-1)[:1] = value_K
    patch = {
        name: Change(torch.tensor([0]), value_K if name == "k.weight" else weights[name].view(-1)[:1])
        for name in SHAPES
    }
    with pytest.raises(Tainted, match=r"q\.weight|k\.weight|v\.weight"):
        ranks.take(lay_changes(patch, {name: fingerprint(weights[name]) for name in SHAPES}))


def test_ranks_that_differ_where_they_should_not_are_noticed() -> None:
    ranks = Ranks()
    ranks.learn()
    weights = random_weights()
    ranks.take(lay_whole(weights))
    ranks.workers[1].model_runner.model.norm.data[3] += 1  # type: ignore[attr-defined]
    with pytest.raises(Tainted, match="different"):
        verify(
            ranks.facts,
            {"norm.weight": fingerprint(weights["norm.weight"])},
            ranks.call("rillflow_fingerprints", ["norm.weight"]),
        )


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    ranks = Ranks()
    ranks.learn()
    weights = random_weights()
    ranks.take(lay_whole(weights))
    for wrong in (
        {"other.weight": torch.ones(4)},
        {"norm.weight": torch.ones(HIDDEN)},
        {"norm.weight": torch.ones(3).bfloat16()},
    ):
        laid = lay_whole({"embed.weight": torch.zeros(VOCABULARY, HIDDEN).bfloat16()} | wrong)
        with pytest.raises(ValueError, match="layout"):
            ranks.take(laid)
        laid.remove()
    laid = lay_changes({"embed.weight": Change(None, torch.zeros(3).bfloat16())}, {})
    with pytest.raises(ValueError, match="layout"):
        ranks.take(laid)
    laid.remove()
    ranks.assert_holds(weights)


def test_changes_in_several_files_find_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    ranks.learn()
    weights = random_weights()
    ranks.take(lay_whole(weights))
    monkeypatch.setattr(codec, "SHARD_BYTES", 1)
    index_K, value_K = torch.tensor([3, 40, 200]), torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    weights["q.weight"].view(-1)[index_K] = value_K
    laid = lay_changes({"q.weight": Change(index_K, value_K)}, {"q.weight": fingerprint(weights["q.weight"])})
    assert len(list(laid.folder.iterdir())) == 2
    ranks.take(laid)
    ranks.assert_holds(weights)


def test_what_a_dead_process_has_left_in_memory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SHARED_MEMORY", tmp_path)
    left, young, foreign = tmp_path / "rillflow-1-a", tmp_path / "rillflow-1-b", tmp_path / "other-1-c"
    for folder in (left, young, foreign):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
    mine = lay_whole(random_weights())
    for folder in (left, foreign, mine.folder):
        os.utime(folder, (0, 0))
    lay_whole(random_weights()).remove()
    assert set(tmp_path.iterdir()) == {young, foreign, mine.folder}, "one that is in use stays, however old"
    mine.remove()
    assert set(tmp_path.iterdir()) == {young, foreign}


@pytest.mark.parametrize(("odd", "named"), [("scaled", r"q\.weight"), ("composed", r"norm\.weight"), ("head", "head")])
def test_a_layout_that_cannot_be_followed_is_refused(odd: str, named: str) -> None:
    ranks = Ranks(odd=odd)
    with pytest.raises(ConfigError, match=named):
        ranks.learn()
    for worker in ranks.workers:
        assert not any(tensor.any() for tensor in worker.model_runner.model.state_dict().values())  # type: ignore[attr-defined]


def test_another_dtype_is_refused() -> None:
    ranks = Ranks(torch.float32)
    shapes = {name: list(shape) for name, shape in SHAPES.items()}
    with pytest.raises(ConfigError, match="bf16"):
        check_layout(ranks.facts, ranks.call("rillflow_layout", shapes, "bfloat16"))


@settings(max_examples=repetitions(20, 60), deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.sampled_from([1, 2, 3, 4, 8, 12]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_fingerprints_are_those_of_the_published_tensor(rows: int, columns: int, dtype: torch.dtype, seed: int) -> None:
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    place = Place(0, tuple(tensor.shape), tuple(tensor.stride()), tensor)
    assert int(sums_of([place])[0], 16) == fingerprint(tensor)


def test_fingerprints_of_parts_alike_are_computed_at_once() -> None:
    source = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=source).bfloat16() for shape in [(5, 8), (5, 8), (3,), (5, 8), (3,)]]
    places = [Place(0, tuple(tensor.shape), tuple(tensor.stride()), tensor) for tensor in tensors]
    assert [int(summed, 16) for summed in sums_of(places)] == [fingerprint(tensor) for tensor in tensors]


def test_only_a_whole_tensor_in_its_own_order_is_written_without_a_look() -> None:
    tensor = torch.zeros(6, 8)
    assert is_all(Place(0, (6, 8), (8, 1), tensor), (6, 8))
    assert not is_all(Place(0, (3, 8), (8, 1), tensor[:3]), (6, 8)), "a shard"
    assert not is_all(Place(0, (8, 6), (1, 8), torch.zeros(8, 6)), (6, 8)), "transposed"
    assert not is_all(Place(0, (6, 8), (8, 1), torch.zeros(6, 16)[:, :8]), (6, 8)), "rows with gaps"


def test_a_part_scatters_only_what_is_its_own() -> None:
    tensor = torch.zeros(6, 8)
    part = torch.zeros(2, 4)
    place = Place(2 * 8 + 4, (2, 4), (8, 1), part)  # rows 2 and 3, columns 4 to 7
    index_K = torch.arange(48)
    value_K = torch.arange(48.0)
    scatter(place, index_K, value_K)
    tensor.view(-1)[index_K] = value_K
    assert torch.equal(part, tensor[2:4, 4:])


class Stacks(torch.nn.Module):
    """Stacks of experts. The loader copies them expert by expert: gates first, then the other halves, as vLLM's do."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = torch.nn.Parameter(torch.zeros(4, 12, 8, dtype=torch.bfloat16), requires_grad=False)
        self.w2 = torch.nn.Parameter(torch.zeros(4, 8, 6, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name == "gate_up":
                for half in (0, 1):
                    for expert, part in enumerate(loaded.chunk(2, 1)[half].unbind()):
                        self.w13.data[expert].narrow(0, half * 6, 6).copy_(part)
            elif name == "down":
                for expert, part in enumerate(loaded.unbind()):
                    self.w2.data[expert].copy_(part)
            else:  # experts in another order
                for expert, part in enumerate(loaded.unbind()):
                    self.w2.data[3 - expert].copy_(part)


def test_experts_that_lie_as_they_were_published_are_one_part() -> None:
    worker = RillflowWorker()
    worker.model_runner = SimpleNamespace(model=Stacks())  # type: ignore[attr-defined]
    shapes = {"gate_up": [4, 12, 8], "down": [4, 8, 6], "reversed": [4, 8, 6]}
    spread = worker.rillflow_layout(shapes, "bfloat16")["spread"]
    assert spread["gate_up"] == [[0, [384], [1]]]
    assert spread["down"] == [[0, [192], [1]]]
    assert len(spread["reversed"]) == 4
    stack = torch.randn(4, 12, 8).to(torch.bfloat16)
    laid = lay_whole({"gate_up": stack})
    worker.rillflow_load(sorted(map(str, laid.folder.iterdir())))
    laid.remove()
    assert torch.equal(worker.model_runner.model.w13, stack)  # type: ignore[attr-defined]


def test_a_loader_gets_the_names_of_a_checkpoint() -> None:
    worker = RillflowWorker()
    worker.model_runner = SimpleNamespace(model=Stacks())  # type: ignore[attr-defined]
    pieces = {"published": [["gate_up", 0, [4, 12, 8], [96, 8, 1]], ["down", 384, [4, 8, 6], [48, 6, 1]]]}
    spread = worker.rillflow_layout({"published": [576]}, "bfloat16", pieces)["spread"]
    assert spread["published"] == [[0, [384], [1]], [384, [192], [1]]]
