"""One rank of `test_sharding.py`: a sharded model compared with the same model whole."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rillflow.config import LoraConfig, TrainerConfig
from rillflow.trainer import lora
from rillflow.trainer.checkpoint import own_slices, wanted_by
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Alone, Peers, sharding
from rillflow.trainer.parallel.distributed import connect
from rillflow.trainer.parallel.launch import Place
from rillflow.trainer.parallel.sharding import entered, load_shards, shard, whole

CPU = torch.device("cpu")


def model_of(*, tied: bool = True) -> PreTrainedModel:
    """Sizes that do not divide by the number of ranks."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 33, "hidden_size": 16, "intermediate_size": 25, "head_dim": 8}
    heads: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    model: PreTrainedModel = Qwen3ForCausalLM(
        Qwen3Config(**sizes, **heads, tie_word_embeddings=tied, initializer_range=0.3)
    )
    return model.eval()


def loss_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Through the decoder and the head apart, as the trainer does."""
    hidden = model.model(tokens).last_hidden_state
    logits = torch.nn.functional.linear(hidden, model.lm_head.weight).float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def tokens_of(rank: int, micro: int) -> torch.Tensor:
    return torch.randint(0, 33, (2, 7 + rank), generator=torch.Generator().manual_seed(10 * rank + micro))


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """To the rounding of its largest value: sums over tokens nearly cancel out elsewhere."""
    torch.testing.assert_close(got, expected, rtol=0.0, atol=2e-5 * float(expected.abs().max()))


def gradients_are_summed(peers: Peers, *, tied: bool, copies: int = 1, late: bool = False) -> None:
    """Two micro-batches on each rank, then an update; against one process with all of them."""
    plain, sharded = model_of(tied=tied), model_of(tied=tied)
    shard(sharded, TrainerConfig(sharding="fsdp", ranks=peers.size, copies=copies), peers, CPU)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    run = entered(sharded, lambda tokens: loss_of(sharded, tokens))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in (plain, sharded)]
    for step in range(3):
        losses = [loss_of(plain, tokens_of(rank, micro)) for rank in range(peers.size) for micro in (step, step + 9)]
        sum(losses).backward()
        with torch.no_grad():  # scoring gathers weights too: they must not outlive the update
            scored = run(tokens_of(peers.rank, step))
        torch.testing.assert_close(scored, losses[2 * peers.rank].detach(), rtol=1e-5, atol=1e-5)
        for micro in (step, step + 9):
            sharding.reduce_gradients(sharded, micro == step + 9 or not late)
            run(tokens_of(peers.rank, micro)).backward()
            assert not (late and micro == step and any(p.grad is not None for p in sharded.parameters()))
        expected = dict(plain.named_parameters())
        for name, parameter in sharded.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert_near(whole(parameter.grad, torch.float32), expected[name].grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in sharded.named_parameters():
        assert_near(whole(parameter.detach(), torch.float32), dict(plain.named_parameters())[name].detach())
    assert ("lm_head.weight" in dict(sharded.named_parameters())) is not tied
    assert (sharded.lm_head.weight is sharded.model.embed_tokens.weight) is tied


def bf16_computes_low_and_keeps_high(peers: Peers) -> None:
    sharded = model_of()
    shard(sharded, TrainerConfig(sharding="fsdp", dtype="bf16"), peers, CPU)
    seen = []

    def look(tokens: torch.Tensor) -> torch.Tensor:
        seen.append((sharded.lm_head.weight.dtype, sharded.model(tokens).last_hidden_state.dtype))
        return loss_of(sharded, tokens)

    entered(sharded, look)(tokens_of(peers.rank, 0)).backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    for parameter in sharded.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def what_a_restore_writes_is_what_computes(peers: Peers) -> None:
    sharded = model_of()
    shard(sharded, TrainerConfig(sharding="fsdp"), peers, CPU)
    run = entered(sharded, lambda tokens: loss_of(sharded, tokens))
    with torch.no_grad():
        before = run(tokens_of(0, 0))
        for parameter in sharded.parameters():
            parameter.mul_(0.5)
        after = run(tokens_of(0, 0))
        plain = model_of()
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    torch.testing.assert_close(after, loss_of(plain, tokens_of(0, 0)).detach())
    assert not torch.equal(before, after)


def each_rank_reads_its_own_rows(peers: Peers, folder: Path, *, tied: bool) -> None:
    """Loaded by shards, a model is the whole one: its weights, its rotary tables, its log-probs and its gradients."""
    path = folder / ("tied" if tied else "untied")
    plain = model_of(tied=tied)
    if peers.rank == 0:
        plain.save_pretrained(path, max_shard_size="4KB")
    peers.agree(None)
    assert tied or len(list(path.glob("*.safetensors"))) > 1
    config = TrainerConfig(sharding="fsdp", ranks=peers.size)
    loaded = load_shards(str(path), lambda model: shard(model, config, peers, CPU), peers, CPU)
    assert loaded is not None
    assert all(isinstance(parameter, DTensor) for parameter in loaded.parameters())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    run = entered(loaded, lambda tokens: loss_of(loaded, tokens))
    expected = loss_of(plain, tokens_of(0, 0))
    found = run(tokens_of(0, 0))
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in loaded.named_parameters():
        assert torch.equal(whole(parameter.detach(), torch.float32), dict(plain.named_parameters())[name])
        assert parameter.grad is not None
        assert_near(whole(parameter.grad, torch.float32), peers.size * grads[name])
    assert whole(next(loaded.parameters()).detach(), torch.float32, here=False).numel() == 0


def other_files_are_loaded_whole(peers: Peers, folder: Path) -> None:
    """A folder whose weights have other names than the model's."""
    path = folder / "tied"
    renamed = folder / f"renamed{peers.rank}"
    shutil.copytree(path, renamed)
    for file in renamed.glob("*.safetensors"):
        tensors = {f"other.{name}": tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file)
    assert load_shards(str(renamed), lambda model: None, peers, CPU) is None


def adapters_are_sharded(peers: Peers) -> None:
    """Two updates of sharded adapters, with a pass without them before each; against one process with all rows."""
    config = TrainerConfig(sharding="fsdp", ranks=peers.size, lora=LoraConfig(rank=3), lr=0.01)
    plain, sharded = model_of(), model_of()
    for model in (plain, sharded):
        lora.wrap(model, config.lora, 5)
    shard(sharded, config, peers, CPU)
    run = entered(sharded, lambda tokens: loss_of(sharded, tokens))
    one, several = Optimizer(plain, config, Alone()), Optimizer(sharded, config, peers)
    for step in range(2):
        with torch.no_grad(), lora.adapters_off(sharded):
            off = run(tokens_of(0, 9))
        torch.testing.assert_close(off, loss_of(model_of(), tokens_of(0, 9)).detach())
        one.zero()
        several.zero()
        sum(loss_of(plain, tokens_of(rank, step)) for rank in range(peers.size)).backward()
        run(tokens_of(peers.rank, step)).backward()
        norms = one.update(0.1)["grad_norm"], several.update(0.1)["grad_norm"]
        torch.testing.assert_close(*map(torch.tensor, norms))
    assert all(isinstance(tensor, DTensor) for tensor in several.masters().values())
    expected, found = one.weights(torch.float32), several.weights(torch.float32, here=peers.rank == 0)
    for name, tensor in found.items():
        assert tensor.numel() == (expected[name].numel() if peers.rank == 0 else 0)
        if peers.rank == 0:
            assert_near(tensor, expected[name])
    ours, theirs = several.adapter(), one.adapter()
    assert ours is not None
    assert theirs is not None
    for name, tensor in ours.tensors.items():
        assert_near(tensor, theirs.tensors[name])
    again = model_of()
    lora.wrap(again, config.lora, 6)
    shard(again, config, peers, CPU)
    resumed = Optimizer(again, config, peers)
    resumed.restore(several.masters(), several.moments(), several.steps)
    for name, tensor in resumed.masters().items():
        assert torch.equal(tensor.to_local(), several.masters()[name].to_local())


def copies_are_written_once(peers: Peers) -> None:
    """Of a model in two copies, checkpoints and publications have each weight once, and the norm counts it once."""
    config = TrainerConfig(sharding="fsdp", ranks=peers.size, copies=2, lr=0.01)
    plain, sharded = model_of(), model_of()
    shard(sharded, config, peers, CPU)
    run = entered(sharded, lambda tokens: loss_of(sharded, tokens))
    one, several = Optimizer(plain, config.model_copy(update={"copies": 1}), Alone()), Optimizer(sharded, config, peers)
    sum(loss_of(plain, tokens_of(rank, 0)) for rank in range(peers.size)).backward()
    run(tokens_of(peers.rank, 0)).backward()
    torch.testing.assert_close(*(torch.tensor(made.update(0.1)["grad_norm"]) for made in (one, several)))
    expected = one.weights(torch.float32)
    slices, _ = own_slices(several.masters(), peers.rank, peers.size)
    shards = several.shards(torch.float32)
    for name, tensor in several.masters().items():
        rows, weights = len(slices.get(name, ())), sum(p.numel() for at, p in shards.parts.items() if at.tensor == name)
        assert peers.total([rows, weights]) == [len(tensor), tensor.numel()]
        assert_near(whole(tensor, torch.float32), expected[name])
    wanted = wanted_by(several.masters(), peers.rank, peers.size)
    again = model_of()
    shard(again, config, peers, CPU)
    resumed = Optimizer(again, config, peers)
    kept = {name: whole(tensor, torch.float32) for name, tensor in several.masters().items()}
    moments = {name: whole(tensor, torch.float32) for name, tensor in several.moments().items()}
    mine = [
        {
            name: tensor[slice(*wanted(name, tuple(tensor.shape)))] if tensor.ndim else tensor
            for name, tensor in of.items()
        }
        for of in (kept, moments)
    ]
    resumed.restore(mine[0], mine[1], several.steps)
    for name, tensor in resumed.masters().items():
        assert torch.equal(tensor.to_local(), several.masters()[name].to_local())
    for made in (several, resumed):
        made.zero()
    for model in (sharded, again):
        entered(model, lambda tokens, model=model: loss_of(model, tokens))(tokens_of(peers.rank, 1)).backward()
    assert several.update(0.1) == resumed.update(0.1)
    for name, tensor in resumed.masters().items():
        assert torch.equal(tensor.to_local(), several.masters()[name].to_local())


class Abandoned(Exception):
    pass


def an_abandoned_update_leaves_no_gradient(peers: Peers) -> None:
    """Gradients that were added up before a step was abandoned are part of no later update."""
    sys.path.append(str(Path(__file__).parents[1]))
    from trainer_helpers import learner, random_rows, small_model

    settings: dict[str, Any] = {"sharding": "fsdp", "accumulate": "whole", "ranks": peers.size}
    settings |= {"micro_tokens": 20, "batch_groups": 3}

    def made() -> Worker:
        model = small_model()
        shard(model, TrainerConfig(**settings), peers, CPU)
        return learner(model, peers=peers, **settings)

    once, never = made(), made()
    left = iter([None, None, None])

    def check() -> None:
        if next(left, Abandoned) is Abandoned:
            raise Abandoned

    try:
        once.step([random_rows(1)], check)
    except Abandoned:
        pass
    else:
        raise AssertionError("the step was not abandoned")
    found = [worker.step([random_rows(5)]) for worker in (once, never)]
    assert found[0]["grad_norm"] == found[1]["grad_norm"]
    for name, tensor in once.masters().items():
        assert torch.equal(tensor.to_local(), never.masters()[name].to_local())


def main(rank: int, ranks: int, rendezvous: str, folder: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)  # of a CPU that computes bf16 in software
    torch.set_num_threads(1)
    sharding._PIECE = 256  # bytes: tensors travel in several pieces
    with connect(Place(rank, ranks, rendezvous), CPU) as peers:
        each_rank_reads_its_own_rows(peers, Path(folder), tied=True)
        each_rank_reads_its_own_rows(peers, Path(folder), tied=False)
        other_files_are_loaded_whole(peers, Path(folder))
        adapters_are_sharded(peers)
        gradients_are_summed(peers, tied=True)
        gradients_are_summed(peers, tied=False)
        gradients_are_summed(peers, tied=True, late=True)
        if ranks % 2 == 0:
            gradients_are_summed(peers, tied=True, copies=2)
            gradients_are_summed(peers, tied=False, copies=2, late=True)
            copies_are_written_once(peers)
        an_abandoned_update_leaves_no_gradient(peers)
        bf16_computes_low_and_keeps_high(peers)
        what_a_restore_writes_is_what_computes(peers)
