"""Updates on fp32 masters: alone, over ranks, in bf16 and on shards; and exact continuation."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainer_helpers import VOCAB, small_model
from transformers import PreTrainedModel

from rillflow.config import TrainerConfig
from rillflow.errors import CheckpointError
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Alone

quiet_bf16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 falls back, slowly


def config(**settings: Any) -> TrainerConfig:
    return TrainerConfig(**{"lr": 1e-2, "max_grad_norm": 0.3, **settings})


def accumulate(model: PreTrainedModel, seed: int, scale: float = 1.0) -> None:
    """The gradients of a made-up loss."""
    tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))
    logits = model(input_ids=tokens, use_cache=False).logits
    (scale * torch.log_softmax(logits.float(), -1)[..., 3].sum()).backward()


def same(one: Optimizer, other: Optimizer) -> bool:
    mine, theirs = one.masters() | one.moments(), other.masters() | other.moments()
    return set(mine) == set(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


def stepped(steps: int, model: PreTrainedModel | None = None, **settings: Any) -> Optimizer:
    model = model or small_model()
    optimizer = Optimizer(model, config(**settings), Alone())
    for step in range(steps):
        optimizer.zero()
        accumulate(model, step)
        accumulate(model, step + 100)
        optimizer.update(0.25)
    return optimizer


def test_in_fp32_it_is_plain_adamw_bit_for_bit() -> None:
    model, settings = small_model(), config(warmup_steps=2)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=settings.betas, weight_decay=0.01, fused=True)
    for step in range(4):
        plain.zero_grad()
        plain.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        accumulate(model, step)
        accumulate(model, step + 100)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.25)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        plain.step()
    ours = stepped(4, warmup_steps=2)
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert set(ours.masters()) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.masters().items())


def test_an_update_reports_norm_and_rate() -> None:
    model = small_model()
    optimizer = Optimizer(model, config(warmup_steps=4), Alone())
    accumulate(model, 0)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    values = optimizer.update(0.5)
    assert values == pytest.approx({"grad_norm": float(norm) / 2, "lr": 0.0025, "skipped": 0.0})
    assert optimizer.steps == 1


@quiet_bf16
def test_bf16_parameters_are_copies_of_fp32_masters() -> None:
    model = small_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = Optimizer(model, config(dtype="bf16"), Alone())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.masters().items())
    for step in range(3):
        optimizer.zero()
        accumulate(model, step)
        optimizer.update(1.0)
    assert {t.dtype for t in (optimizer.masters() | optimizer.moments()).values()} == {torch.float32}
    for name, parameter in model.state_dict().items():
        assert optimizer.weights(torch.bfloat16)[name].data_ptr() == parameter.data_ptr(), "no second copy"
        assert torch.equal(parameter, optimizer.weights(torch.float32)[name].bfloat16())


@quiet_bf16
def test_bf16_gradients_add_up_in_fp32() -> None:
    """256 + 1 is 256 in bf16: a small gradient after a large one would be lost."""
    model = small_model()
    optimizer = Optimizer(model, config(dtype="bf16"), Alone())
    weight = model.model.norm.weight
    for size in (256.0, 1.0, 1.0):
        (weight * size).sum().backward()
    assert weight.grad is None
    master = next(m for name, m in optimizer._masters.items() if name == "model.norm.weight")
    assert master.grad is not None
    assert torch.equal(master.grad, torch.full_like(master, 258.0))


@quiet_bf16
def test_tiny_updates_add_up_in_the_masters_of_a_bf16_model() -> None:
    model = small_model()
    optimizer = Optimizer(model, config(dtype="bf16", lr=1e-5, weight_decay=0.0), Alone())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(40):
        optimizer.zero()
        accumulate(model, 0)
        optimizer.update(1.0)
    name = "model.norm.weight"  # ones: a step of 1e-5 is far below their last place in bf16
    assert torch.equal(model.state_dict()[name], before[name])
    moved = (optimizer.masters()[name] - before[name].float()).abs()
    assert moved.max() > 3e-4


@quiet_bf16
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_restore_continues_bit_for_bit(dtype: str) -> None:
    straight, first = stepped(5, dtype=dtype), stepped(3, dtype=dtype)
    model = small_model(seed=9)
    second = Optimizer(model, config(dtype=dtype), Alone())
    second.restore(first.masters(), first.moments(), first.steps)
    for step in range(3, 5):
        second.zero()
        accumulate(model, step)
        accumulate(model, step + 100)
        second.update(0.25)
    assert same(straight, second)
    assert second.steps == 5


def test_restore_refuses_another_model() -> None:
    with pytest.raises(CheckpointError, match="another model"):
        stepped(0).restore(stepped(0, small_model(tied=False)).masters(), {}, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_not_applied(value: float) -> None:
    model = small_model()
    optimizer = Optimizer(model, config(), Alone())
    accumulate(model, 0)
    next(model.parameters()).grad[0, 0] = value  # type: ignore[index]
    assert optimizer.update(1.0)["skipped"] == 1
    assert same(optimizer, stepped(0))
    optimizer.zero()
    accumulate(model, 0)
    assert optimizer.update(1.0)["skipped"] == 0


def test_without_a_gradient_nothing_changes() -> None:
    optimizer = stepped(0)
    assert optimizer.update(1.0)["skipped"] == 1
    assert same(optimizer, stepped(0))
    assert optimizer.steps == 1


def test_weights_keep_their_ties() -> None:
    weights = stepped(1).weights(torch.bfloat16)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    assert stepped(1).adapter() is None


# ------------------------------------------------------------ over ranks


class Thread(Alone):
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared  # type: ignore[misc]

    def _all(self, mine: Any) -> list[Any]:
        self._shared["said"][self.rank] = mine
        self._shared["barrier"].wait()
        said = list(self._shared["said"])
        self._shared["barrier"].wait()
        return said

    def total(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self._all(list(values)), strict=True)]

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        for mine, all_of_them in zip(tensors, zip(*self._all([t.clone() for t in tensors]), strict=True), strict=True):
            mine.copy_(torch.stack(all_of_them).sum(0))


def over_ranks(size: int, work: Any) -> None:
    shared = {"said": [None] * size, "barrier": threading.Barrier(size, timeout=60)}
    threads = [threading.Thread(target=work, args=(Thread(rank, size, shared),)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)


@quiet_bf16
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ranks_apply_the_sum_of_their_gradients(dtype: str) -> None:
    """Also one that has nothing to train on."""
    made: dict[int, Optimizer] = {}
    models = [small_model() for _ in range(3)]

    def rank(peers: Thread) -> None:
        model = models[peers.rank]
        made[peers.rank] = optimizer = Optimizer(model, config(dtype=dtype), peers)
        for step in range(3):
            optimizer.zero()
            if peers.rank < 2:
                accumulate(model, step + 100 * peers.rank)
            optimizer.update(0.25)

    over_ranks(3, rank)
    assert same(made[0], made[1])
    assert same(made[0], made[2])
    alone = stepped(3, dtype=dtype).masters()
    for name, tensor in made[0].masters().items():
        assert torch.allclose(tensor, alone[name], atol=1e-5), name


def test_ranks_skip_together() -> None:
    skipped: dict[int, float] = {}
    models = [small_model() for _ in range(2)]

    def rank(peers: Thread) -> None:
        model = models[peers.rank]
        optimizer = Optimizer(model, config(), peers)
        accumulate(model, peers.rank)
        if peers.rank == 1:
            next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
        skipped[peers.rank] = optimizer.update(1.0)["skipped"]

    over_ranks(2, rank)
    assert skipped == {0: 1.0, 1: 1.0}


# ------------------------------------------------------------ on shards


@pytest.fixture
def one_process() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_shards_are_updated_as_whole_parameters_are(one_process: DeviceMesh) -> None:
    model = small_model()
    fully_shard(model, mesh=one_process)
    optimizer = Optimizer(model, config(), Alone())
    for step in range(3):
        optimizer.zero()
        accumulate(model, step)
        accumulate(model, step + 100)
        optimizer.update(0.25)
    plain = stepped(3)
    moments = {name: t for name, t in optimizer.moments().items() if not name.startswith("step/")}
    assert all(isinstance(tensor, DTensor) for tensor in (optimizer.masters() | moments).values())
    assert set(optimizer.masters()) == set(plain.masters())
    weights = optimizer.weights(torch.float32)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    for name, tensor in plain.weights(torch.float32).items():
        assert not isinstance(weights[name], DTensor)
        assert torch.allclose(weights[name], tensor, atol=1e-6), name


def test_shards_continue_bit_for_bit(one_process: DeviceMesh) -> None:
    def sharded(seed: int) -> tuple[PreTrainedModel, Optimizer]:
        model = small_model(seed=seed)
        fully_shard(model, mesh=one_process)
        return model, Optimizer(model, config(), Alone())

    model, first = sharded(0)
    accumulate(model, 0)
    first.update(1.0)
    other, second = sharded(9)
    local = {name: tensor.to_local() for name, tensor in first.masters().items()}  # type: ignore[attr-defined]
    second.restore(local, first.moments(), first.steps)
    for of, optimizer in ((model, first), (other, second)):
        optimizer.zero()
        accumulate(of, 1)
        optimizer.update(1.0)
    mine, theirs = first.masters() | first.moments(), second.masters() | second.moments()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
