"""One rank of `test_tensor.py`: teams of ranks that share the weights of layers, compared with one rank."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3ForSequenceClassification

sys.path.append(str(Path(__file__).parents[1]))
from context_rank import CPU, TIMES, own_rows
from packed_helpers import grouped_model
from trainer_helpers import learner, random_rows

from model_families import FAMILIES, build
from model_families import random_rows as rows_of_family
from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer.attention import choose
from rillflow.trainer.batches import Databuffer, Rows
from rillflow.trainer.checkpoint import Checkpoints, State
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.packing import micro_batches
from rillflow.trainer.parallel import Alone, Peers
from rillflow.trainer.parallel.context import Context, in_teams
from rillflow.trainer.parallel.distributed import connect
from rillflow.trainer.parallel.launch import Place
from rillflow.trainer.parallel.sharding import whole
from rillflow.trainer.parallel.tensor import Part, split
from rillflow.trainer.roles import prepared

made = partial(grouped_model, dtype=torch.float32)


def worker_of(model: PreTrainedModel, peers: Peers, **settings: Any) -> Worker:
    config = TrainerConfig(**settings)
    context = Context.of(config, peers)
    split(prepared(model, config), config, peers, context.group, CPU)
    return learner(model, peers=peers, context=context, **settings)


def settings_of(peers: Peers, size: int, **settings: Any) -> dict[str, Any]:
    alike = {"eps": 1e-4, "lr": 2e-3, "batch_groups": 3, "micro_tokens": 40}
    return alike | settings | {"ranks": peers.size, "tensor_ranks": size}


def same_steps(peers: Peers, rows: list[Rows], size: int, **settings: Any) -> None:
    """Some updates of all ranks, and of one rank with all rows: the same metrics and weights."""
    ours = settings_of(peers, size, **settings)
    alone = {name: value for name, value in ours.items() if name not in ("ranks", "tensor_ranks")}
    one, several = worker_of(made(), Alone(), **alone), worker_of(made(), peers, **ours)
    teams = in_teams(peers, TrainerConfig(**ours))
    for part in rows:
        expected, found = one.step([part]), several.step([own_rows(part, teams)])
        for name, value in expected.items():
            if not name.endswith(TIMES):
                assert abs(found[name] - value) <= 2e-5 * abs(value) + 1e-6, (settings, name, found[name], value)
    close_to(several, one)
    published, kept = several.weights(torch.float32), one.weights(torch.float32)
    assert published.keys() == kept.keys()
    for name, tensor in kept.items() if peers.rank == 0 else ():
        torch.testing.assert_close(published[name], tensor, rtol=1e-5, atol=1e-5)


def close_to(several: Worker, one: Worker) -> None:
    kept = one.masters()
    for name, tensor in several.masters().items():
        torch.testing.assert_close(whole(tensor, torch.float32), kept[name], rtol=1e-5, atol=1e-5)


def weights_are_parts(peers: Peers, size: int) -> None:
    """A rank holds its part of what it computes with, and of the moments."""
    model = made()
    worker = worker_of(model, peers, **settings_of(peers, size))
    parts = {name: p for name, p in model.named_parameters() if isinstance(p, Part)}
    assert len(parts) == 7 * model.config.num_hidden_layers
    for part in parts.values():
        assert part.numel() * size == part.shape_whole.numel()
    worker.step([own_rows(random_rows(1), in_teams(peers, TrainerConfig(**settings_of(peers, size))))])
    moments = worker.moments()
    for name, part in parts.items():
        assert moments[f"exp_avg/{name}"].shape == part.shape_whole
        assert moments[f"exp_avg/{name}"].to_local().numel() == part.numel()


def critics_too(peers: Peers, size: int) -> None:
    config = TrainerConfig(**settings_of(peers, size))
    context, found = Context.of(config, peers), []
    for shared in (False, True):
        shape = made().config
        shape.num_labels, shape.pad_token_id = 1, 0
        torch.manual_seed(3)
        critic = Qwen3ForSequenceClassification(shape).eval()
        if shared:
            split(critic, config, peers, context.group, CPU)
        forward = ScalarForward(critic, config, context=context if shared else Context())
        (make,) = micro_batches(Databuffer(random_rows(4)), [], 4096, device=CPU)
        found.append(forward(make()))
        found[-1].square().sum().backward()
        norm = critic.model.norm.weight.grad
        if shared:
            peers.add([norm])
            norm /= peers.size // size
        found.append(norm)
    torch.testing.assert_close(found[2:], found[:2], rtol=1e-4, atol=1e-5)


def it_continues_exactly(peers: Peers, size: int, folder: Path) -> None:
    """From a checkpoint, with as many ranks, and alone."""
    ours, rows = settings_of(peers, size), [random_rows(seed) for seed in (1, 2)]
    teams = in_teams(peers, TrainerConfig(**ours))
    first = worker_of(made(), peers, **ours)
    first.step([own_rows(rows[0], teams)])
    checkpoints = Checkpoints(folder, 2, peers)
    state = State(version=1, step=1, recipe="", random={})
    checkpoints.save(state, first.masters(), first.moments())
    again = worker_of(made(), peers, **ours)
    found = checkpoints.latest_valid(again.masters())
    assert found is not None
    again.restore(found.masters, found.moments, 1)
    for worker in (first, again):
        worker.step([own_rows(rows[1], teams)])
    for name, tensor in again.masters().items():
        assert torch.equal(whole(tensor, torch.float32), whole(first.masters()[name], torch.float32)), name
    alone = {name: value for name, value in ours.items() if name not in ("ranks", "tensor_ranks")}
    one = worker_of(made(), Alone(), **alone)
    read = Checkpoints(folder, 2, Alone()).load(1)
    one.restore(read.masters, read.moments, 1)
    one.step([rows[1]])
    close_to(again, one)


def bf16_is_nearly_as_near_as_one_rank(peers: Peers, size: int) -> None:
    """To what fp32 computes: each rank's share of a sum is rounded, too."""
    config = TrainerConfig(tensor_ranks=size, ranks=peers.size, dtype="bf16")
    exact = PolicyForward(made(), TrainerConfig())
    plain = PolicyForward(grouped_model(dtype=torch.bfloat16), config)
    context, model = Context.of(config, peers), grouped_model(dtype=torch.bfloat16)
    ours = PolicyForward(split(model, config, peers, context.group, CPU), config, context=context)
    apart = {
        name: torch.stack([(forward(make())[0] - exact(make())[0]).abs().mean() for make in micros]).mean()
        for name, forward in (("plain", plain), ("ours", ours))
        for micros in [micro_batches(Databuffer(random_rows(2, longest=60)), [], 100, device=CPU)]
    }
    assert apart["ours"] < 1.5 * apart["plain"], apart


def families(peers: Peers, size: int) -> tuple[set[str], set[str]]:
    """Return the families that were computed, and those that were refused by name."""
    config, rows = TrainerConfig(tensor_ranks=size, ranks=peers.size), rows_of_family()
    context, done, refused = Context.of(config, peers), set(), set()
    for family in FAMILIES:
        one, model = build(family), build(family)
        if choose(one, "auto", CPU) == "padded":
            continue
        try:
            split(model, config, peers, context.group, CPU)
            ours, plain = PolicyForward(model, config, context=context), PolicyForward(one, config)
        except ConfigError as error:
            if "cannot share" not in error.message and "no tensor parallel plan" not in error.message:
                raise
            refused.add(family)
            continue
        for make in micro_batches(Databuffer(rows), [], 4096, device=CPU):
            micro = make()
            torch.testing.assert_close(ours(micro)[0], plain(micro)[0], rtol=1e-4, atol=1e-5)
        done.add(family)
    return done, refused


def main(rank: int, ranks: int, rendezvous: str, part: str, folder: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)  # of a CPU that computes bf16 in software
    torch.set_num_threads(1)
    with connect(Place(rank, ranks, rendezvous), CPU) as peers:
        of, rows = 2, [random_rows(seed, longest=30) for seed in (1, 2)]
        same_steps(peers, rows, of)
        if part == "short":
            return
        weights_are_parts(peers, of)
        same_steps(peers, rows, of, algorithm="gspo", trees=True, recompute=True)
        critics_too(peers, of)
        same_steps(peers, rows, of, algorithm="m2po", m2_variant="mask", m2_threshold=0.02, updates=2)
        it_continues_exactly(peers, of, Path(folder))
        bf16_is_nearly_as_near_as_one_rank(peers, of)
        done, refused = families(peers, of)
        assert {"Llama", "Qwen2", "Qwen3", "Gemma 3", "Mistral", "Granite", "GLM-4", "OLMo 2"} <= done, (done, refused)
        assert {"Qwen3-MoE", "Mixtral", "gpt-oss", "DeepSeek-V3", "Phi-3"} <= refused, (done, refused)
