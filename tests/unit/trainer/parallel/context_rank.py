"""One rank of `test_context.py`: teams of ranks that share micro-batches, compared with one rank that has all rows."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).parents[1]))
from packed_helpers import branching, grouped_model, rows_of
from trainer_helpers import VOCAB, learner, random_rows, small_model

from model_families import FAMILIES, build
from model_families import random_rows as rows_of_family
from rillflow.config import LoraConfig, TrainerConfig
from rillflow.trainer import lora
from rillflow.trainer.attention import choose
from rillflow.trainer.batches import EXPERTS, Databuffer, Rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.packing import micro_batches
from rillflow.trainer.parallel import Alone, Peers
from rillflow.trainer.parallel.context import Context, in_teams
from rillflow.trainer.parallel.distributed import connect
from rillflow.trainer.parallel.launch import Place
from rillflow.trainer.parallel.sharding import shard, whole
from rillflow.trainer.roles import prepared

CPU = torch.device("cpu")
TIMES = ("seconds", "mfu", "tokens_per_second")


def worker_of(model: PreTrainedModel, peers: Peers, **settings: Any) -> Worker:
    config = TrainerConfig(**settings)
    if config.lora is not None:
        lora.wrap(model, config.lora, 5)
    prepared(model, config)
    shard(model, config, peers, CPU)
    return learner(model, peers=peers, context=Context.of(config, peers), **settings)


def own_rows(rows: Rows, teams: Peers) -> Databuffer:
    return Databuffer(rows).taking(np.arange(teams.rank, len(rows.length_R), teams.size))


def same_steps(peers: Peers, model: Callable[[], PreTrainedModel], rows: list[Rows], **settings: Any) -> None:
    """Some updates of all ranks, and of one rank with all rows: the same metrics and weights."""
    alike = {"eps": 1e-4, "lr": 2e-3, "batch_groups": 3, "micro_tokens": 40, **settings}
    alone, ours = dict(alike), {"ranks": peers.size, **alike}
    for name in ("context_ranks", "sharding", "copies", "accumulate"):
        alone.pop(name, None)
    one, several = worker_of(model(), Alone(), **alone), worker_of(model(), peers, **ours)
    teams = in_teams(peers, TrainerConfig(**ours))
    for part in rows:
        expected, found = one.step([part]), several.step([own_rows(part, teams)])
        for name, value in expected.items():
            if not name.endswith(TIMES):
                assert abs(found[name] - value) <= 2e-5 * abs(value) + 1e-6, (settings, name, found[name], value)
    kept = one.masters()
    for name, tensor in several.masters().items():
        torch.testing.assert_close(whole(tensor, torch.float32), kept[name], rtol=1e-5, atol=1e-5)


def algorithms_and_shards(peers: Peers, size: int) -> None:
    rows = [random_rows(seed, longest=30) for seed in (1, 2)]

    def model() -> PreTrainedModel:
        return small_model() if size == 2 else grouped_model(dtype=torch.float32)

    def same(**settings: Any) -> None:
        same_steps(peers, model, rows, context_ranks=size, **settings)

    same()
    same(sharding="fsdp", algorithm="gspo", trees=True)
    same(sharding="fsdp", accumulate="whole", recompute=True, entropy=0.01)
    if size == 2:  # the heads of critic and reference
        same(algorithm="ppo", critic={"lr": 2e-3}, kl={"reference": "small"})
        same(sharding="fsdp", algorithm="ppo", critic={"lr": 2e-3}, kl={"reference": "small"})
    same(sharding="fsdp", algorithm="m2po", m2_variant="mask", m2_threshold=0.02, updates=2, truncate=2.0)
    same(lora=LoraConfig(rank=3), recompute=True)
    same(sharding="fsdp", lora=LoraConfig(rank=3), trees=True)
    if peers.size > size:
        same(sharding="fsdp", copies=2)


def kept_values_are_reported_once(peers: Peers, size: int) -> None:
    worker = worker_of(grouped_model(dtype=torch.float32), peers, context_ranks=size, ranks=peers.size)
    rows = random_rows(3)
    rows.kept_R[:] = np.arange(1, 1 + len(rows.kept_R))
    worker.step([own_rows(rows, in_teams(peers, TrainerConfig(context_ranks=size, ranks=peers.size)))])
    assert sorted(peers.total([len(worker.kept)])) == [len(rows.kept_R)]


def grouped_heads_and_trees(peers: Peers, size: int) -> None:
    """Shared keys, long prefixes and packs whose tokens the ranks do not divide, in fp64."""
    config = TrainerConfig(context_ranks=size, ranks=peers.size, trees=True)
    context, rows = Context.of(config, peers), branching(4, rows=14)
    one, model = grouped_model(), grouped_model()
    plain, ours = PolicyForward(one, TrainerConfig(trees=True)), PolicyForward(model, config, context=context)
    for forward in (plain, ours):
        for make in micro_batches(Databuffer(rows), [], 150, device=CPU, trees=True):
            micro = make()
            score_T, _ = forward(micro)
            (score_T * torch.linspace(-1, 1, len(score_T), dtype=torch.float64)).sum().backward()
    grads = {name: parameter.grad for name, parameter in one.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found = parameter.grad.clone()
        peers.add([found])
        expected = grads[name]
        assert expected is not None
        torch.testing.assert_close(found, expected * (peers.size // size), rtol=1e-9, atol=1e-9)


def bf16_is_as_near_as_another_packing(peers: Peers, size: int) -> None:
    config, rows = TrainerConfig(context_ranks=size, ranks=peers.size, dtype="bf16"), random_rows(2, longest=60)
    model = grouped_model(dtype=torch.bfloat16)
    plain, ours = PolicyForward(model, config), PolicyForward(model, config, context=Context.of(config, peers))
    for make in micro_batches(Databuffer(rows), [], 100, device=CPU):
        micro = make()
        torch.testing.assert_close(ours(micro)[0], plain(micro)[0], rtol=0.0, atol=0.15)


def families(peers: Peers, size: int) -> list[str]:
    """Return the families that were computed: those that can be packed."""
    config, rows = TrainerConfig(context_ranks=size, ranks=peers.size), rows_of_family()
    context, done = Context.of(config, peers), []
    for family in FAMILIES:
        one, model = build(family), build(family)
        if choose(one, "auto", CPU) == "padded":
            continue
        ours, plain = PolicyForward(model, config, context=context), PolicyForward(one, config)
        for make in micro_batches(Databuffer(rows), [], 4096, device=CPU):
            micro = make()
            torch.testing.assert_close(ours(micro)[0], plain(micro)[0], rtol=1e-4, atol=1e-5)
        done.append(family)
    return done


def experts_are_balanced_and_replayed(peers: Peers, size: int) -> None:
    rows = rows_of([list(range(1 + n, 20 + 2 * n)) for n in range(6)])
    drawn = np.random.default_rng(3)
    chosen_NW = np.array([[*drawn.permutation(4)[:2], *drawn.permutation(4)[:2]] for _ in rows.tokens_N], "<u2")
    recorded = Databuffer(rows).adding({EXPERTS: chosen_NW.view("V8")[:, 0]})
    for settings in ({"router_loss": 0.5}, {"router_loss": 0.5, "replay_routing": True, "recompute": True}):
        config = TrainerConfig(context_ranks=size, ranks=peers.size, **settings)
        one, model = (prepared(build("Qwen3-MoE"), config) for _ in range(2))
        data = recorded if config.replay_routing else Databuffer(rows)
        plain, ours = PolicyForward(one, config), PolicyForward(model, config, context=Context.of(config, peers))
        for forward in (plain, ours):
            for make in micro_batches(data, [], 70, device=CPU):
                score_T, _ = forward(make())
                assert forward.balance is not None
                (score_T.sum() + forward.balance).backward()
        torch.testing.assert_close(ours.balance, plain.balance)
        grads = {name: parameter.grad for name, parameter in one.named_parameters()}
        for name, parameter in model.named_parameters():
            expected, found = grads[name], torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            peers.add([found])
            if expected is not None:
                scale = max(float(expected.abs().max()), 1e-3)
                torch.testing.assert_close(found, expected * (peers.size // size), rtol=0, atol=1e-4 * scale)


def activations_are_shared(peers: Peers, size: int) -> None:
    """A rank keeps its share of what one rank keeps of a long row for the backward pass."""
    config = TrainerConfig(context_ranks=size, ranks=peers.size, dtype="bf16")
    model, rows = grouped_model(dtype=torch.bfloat16), rows_of([[n % VOCAB for n in range(801)]])
    (make,) = micro_batches(Databuffer(rows), [], 800, device=CPU)

    def kept(context: Context) -> int:
        forward, micro = PolicyForward(model, config, context=context), make()
        found = {weight.untyped_storage().data_ptr(): 0 for weight in model.parameters()}

        def look(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            found.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
            forward(micro)[0].sum().backward()
        return sum(found.values())

    assert kept(Context.of(config, peers)) < (1 / size + 0.1) * kept(Context())


def main(rank: int, ranks: int, rendezvous: str, size: str, part: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)  # of a CPU that computes bf16 in software
    torch.set_num_threads(1)
    with connect(Place(rank, ranks, rendezvous), CPU) as peers:
        of = int(size)
        grouped_heads_and_trees(peers, of)
        if part == "short":
            return
        algorithms_and_shards(peers, of)
        kept_values_are_reported_once(peers, of)
        experts_are_balanced_and_replayed(peers, of)
        activations_are_shared(peers, of)
        bf16_is_as_near_as_another_packing(peers, of)
        assert {"Llama", "Qwen3", "Qwen3-MoE", "DeepSeek-V3"} <= set(families(peers, of)), VOCAB
