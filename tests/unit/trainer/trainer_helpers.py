"""Small models and random batches for the trainer's tests."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.batches import Rows, make_rows
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.graph.builtin import chain_of
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.learner import Learner
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Alone, Peers
from rillflow.trainer.parallel.context import Context
from rillflow.trainer.parallel.sharding import shard
from rillflow.types import BatchSample, Row

VOCAB = 32
# Ranks may be threads, which share torch's generator.
_SEEDED = threading.Lock()


def small_model(seed: int = 0, *, tied: bool = True) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return _made(Qwen3ForCausalLM, config, seed)


def _made(kind: type[PreTrainedModel], config: Qwen3Config, seed: int) -> PreTrainedModel:
    with _SEEDED:
        torch.manual_seed(seed)
        return kind(config).eval()


def random_samples(
    seed: int, groups: int = 3, size: int = 4, longest: int = 14, *, near: float = -3.4
) -> tuple[list[BatchSample], list[dict[str, np.ndarray]]]:
    """Ragged rows whose masks have holes (tool turns), with the statistics of their groups."""
    rng = np.random.default_rng(seed)
    samples: list[BatchSample] = []
    payload: list[dict[str, np.ndarray]] = []
    for group in range(groups):
        rewards = rng.normal(size=size)
        for place in range(size):
            length = int(rng.integers(3, longest + 1))
            mask = (rng.random(length) < 0.6).astype("u1")
            mask[0], mask[1] = 0, 1
            old = np.where(mask, near + 0.5 * rng.normal(size=length), 0.0)
            payload.append(
                {
                    "tokens": rng.integers(0, VOCAB, length).astype("<i4"),
                    "mask": mask,
                    "logprobs": old.astype("<f4"),
                    "raw_logprobs": np.zeros(length, "<f4"),
                    "temperatures": np.ones(length, "<f4"),
                    "versions": np.where(mask, np.arange(length) % 3, -1).astype("<i4"),
                }
            )
            samples.append(
                BatchSample(
                    id=f"g{group}p{place}",
                    row=Row(unit="u", segment=0, offset=len(samples), length=1),
                    tokens=length,
                    trained=int(mask.sum()),
                    reward=float(rewards[place]),
                    group=f"g{group}",
                    group_mean=float(rewards.mean()),
                    group_std=float(rewards.std()),
                    group_size=size,
                    staleness=int(rng.integers(0, 3)),
                    truncated=bool(rng.random() < 0.25),
                    member=group,
                )
            )
    return samples, payload


def random_rows(seed: int, **options: Any) -> Rows:
    return make_rows(*random_samples(seed, **options))


def in_parts(seed: int, sizes: tuple[int, ...]) -> list[Rows]:
    """Return the rows of `random_rows(seed)`, divided into parts of the given sizes."""
    samples, payload = random_samples(seed)
    ends = np.cumsum(sizes)
    assert ends[-1] == len(samples)
    return [make_rows(samples[e - n : e], payload[e - n : e]) for n, e in zip(sizes, ends, strict=True)]


def small_critic(seed: int = 5) -> PreTrainedModel:
    """A model of the shape of `small_model`, with a head of one number."""
    config = small_model().config
    config.num_labels, config.pad_token_id = 1, 0
    return _made(Qwen3ForSequenceClassification, config, seed)


def learners(
    config: TrainerConfig,
    model: PreTrainedModel | None = None,
    *,
    peers: Peers = Alone(),
    in_order: bool = False,
    context: Context = Context(),
) -> dict[str, Learner]:
    """The roles that the recipe's graph has, small. The reference is `small_model(9)`."""
    roles = chain_of(config).roles
    actor = model or small_model()
    forward = PolicyForward(actor, config, context=context)
    made = {
        "actor": Learner("actor", actor, forward, Optimizer(actor, config, peers), config, peers, in_order=in_order)
    }
    if "critic" in roles:
        critic = small_critic()
        _shard(critic, config, peers)
        optimizer, values = Optimizer(critic, config, peers), ScalarForward(critic, config, context=context)
        made["critic"] = Learner("critic", critic, values, optimizer, config, peers, in_order=in_order)
    if "reference" in roles:
        reference = small_model(9).requires_grad_(False)
        _shard(reference, config, peers)
        scores = PolicyForward(reference, config, context=context)
        made["reference"] = Learner("reference", reference, scores, None, config, peers)
    return made


def _shard(model: PreTrainedModel, config: TrainerConfig, peers: Peers) -> None:
    """Shard a model if ranks are processes. Ranks that are threads have whole models, and sum as shards do."""
    if dist.is_initialized():
        shard(model, config, peers)


def learner(
    model: PreTrainedModel | None = None,
    *,
    peers: Peers = Alone(),
    in_order: bool = False,
    context: Context = Context(),
    seed: int = 0,
    **settings: Any,
) -> Worker:
    """All that trains a small policy, by the graph of its algorithm."""
    config = TrainerConfig(**{"lr": 1e-2, **settings})
    models = learners(config, model, peers=peers, in_order=in_order, context=context)
    return Worker(chain_of(config), models, ALGORITHMS[config.algorithm](config), config, peers, seed=seed)
