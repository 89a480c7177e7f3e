"""Whole steps through our own graphs give verl's and TRL's losses and gradients: from the rows of a batch over the
nodes of the algorithm's graph to what reaches the optimizer.

In place of models stand tables of scores, so that the gradient of every trained token can be seen. Columns travel in
float32, hence the tolerances.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from oracle_batches import SEEDS, Padded, random_batch

from rillflow.config import TrainerConfig
from rillflow.contracts import SystemClock
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.batches import Databuffer, Rows, make_rows
from rillflow.trainer.graph.builtin import chain_of
from rillflow.trainer.graph.worker import Pipeline, Step
from rillflow.trainer.learner import Learner
from rillflow.trainer.packing import MicroBatch
from rillflow.trainer.parallel import Alone
from rillflow.types import BatchSample, Row

pytestmark = pytest.mark.oracle

Oracle = dict[str, np.ndarray]
KINDS = ("k1", "k2", "k3")
CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ALGORITHMS if name not in ("m2po", "ppo", "dr_grpo")},
    "dr_grpo": {"algorithm": "dr_grpo", "norm_tokens": 18},
    **{f"grpo {kind} loss": {"kl": {"coefficient": 0.1, "estimator": kind}} for kind in KINDS},
    **{f"grpo {kind} reward": {"kl": {"coefficient": 0.1, "estimator": kind, "where": "reward"}} for kind in KINDS},
    **{
        f"reinforce_plus_plus {kind} reward": {
            "algorithm": "reinforce_plus_plus", "kl": {"coefficient": 0.1, "estimator": kind, "where": "reward"},
        }
        for kind in KINDS
    },
    "dapo overlong": {"algorithm": "dapo", "overlong": {"longest": 10, "margin": 6}},
    "grpo tis": {"truncate": 2.0},
    "dapo tis": {"algorithm": "dapo", "truncate": 2.0},
    "ppo": {"algorithm": "ppo", "critic": {"gamma": 0.97, "lam": 0.9}},
    "ppo k1 reward": {
        "algorithm": "ppo",
        "critic": {"gamma": 0.97, "lam": 0.9},
        "kl": {"coefficient": 0.1, "estimator": "k1", "where": "reward"},
    },
}  # fmt: skip


class Table(torch.nn.Module):
    """A model that knows its scores: `asked` without gradient, `learnt` with. A token's id is its place in them."""

    def __init__(self, asked_N: np.ndarray, learnt_N: np.ndarray) -> None:
        super().__init__()
        self._asked_N = torch.from_numpy(asked_N)
        self.learnt_N = torch.nn.Parameter(torch.from_numpy(learnt_N))

    def forward(self, micro: MicroBatch) -> torch.Tensor:
        return (self.learnt_N if torch.is_grad_enabled() else self._asked_N)[micro.target_T]


class Seen:
    """In place of an optimizer: keeps the gradient as it would be applied."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.gradient_N = np.zeros(0)

    def zero(self) -> None:
        self._table.learnt_N.grad = None

    def update(self, scale: float) -> dict[str, float]:
        assert self._table.learnt_N.grad is not None
        self.gradient_N = (self._table.learnt_N.grad * scale).numpy()
        return {"grad_norm": 0.0, "lr": 0.0, "skipped": 0.0}


def rows_of(batch: Padded, old: str) -> Rows:
    """A prompt of one token before each answer; `old` names what the engine recorded."""
    score_R, group_R = batch.arrays["token_reward"].sum(1), batch.arrays["group"]
    samples, payload = [], []
    for row, mask in enumerate(batch.mask_BL):
        mine = score_R[group_R == group_R[row]]
        payload.append(
            {
                "tokens": (np.arange(len(mask) + 1) + row * (len(mask) + 1)).astype("<i4"),
                "mask": np.append(False, mask).astype("u1"),
                "logprobs": np.append(0.0, batch.arrays[old][row]).astype("<f4"),
                "raw_logprobs": np.zeros(len(mask) + 1, "<f4"),
                "temperatures": np.ones(len(mask) + 1, "<f4"),
                "versions": np.zeros(len(mask) + 1, "<i4"),
            }
        )
        samples.append(
            BatchSample(
                id=str(row), row=Row(unit="u", segment=0, offset=row, length=1), tokens=len(mask) + 1,
                trained=int(mask.sum()), reward=float(score_R[row]), group=str(group_R[row]),
                group_mean=float(mine.mean()), group_std=float(mine.std()), group_size=len(mine), staleness=0,
                truncated=False, member=int(group_R[row]),
            )
        )  # fmt: skip
    return make_rows(samples, payload)


def flat(batch: Padded, name: str) -> np.ndarray:
    return np.pad(batch.arrays[name], ((0, 0), (1, 0))).ravel()


def play(batch: Padded, config: TrainerConfig, *, cut: int) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of the step, and the gradients [row, token] of actor and critic. The batch comes in two parts."""
    rows = rows_of(batch, "behaviour" if config.truncate else "old")
    tables = {
        "actor": Table(flat(batch, "old"), flat(batch, "new")),
        "critic": Table(flat(batch, "old_value"), flat(batch, "value")),
        "reference": Table(flat(batch, "reference"), flat(batch, "reference")),
    }
    seen = {role: Seen(table) for role, table in tables.items()}
    models = {role: Learner(role, table, table, seen[role], config, Alone()) for role, table in tables.items()}
    whole = Databuffer(rows)

    def parts() -> Iterator[Databuffer]:
        yield whole.taking(np.arange(cut))
        yield whole.taking(np.arange(cut, len(whole)))

    step = Step(
        number=0, config=config, algorithm=ALGORITHMS[config.algorithm](config), models=models, peers=Alone(),
        fetch=parts, generate=parts, publish=lambda: None, check=lambda: None,
    )  # fmt: skip
    metrics = Pipeline(chain_of(config), step, SystemClock()).run()
    gradients = {
        role: one.gradient_N.reshape(len(whole), -1)[:, 1:] for role, one in seen.items() if len(one.gradient_N)
    }
    return metrics, gradients


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_verls(oracle: Oracle, seed: int, name: str) -> None:
    batch = random_batch(seed)
    config = TrainerConfig(**{"micro_tokens": 60, "batch_groups": 5, "lone_rows": "reward", **CASES[name]})
    metrics, gradients = play(batch, config, cut=5)
    agree(batch, oracle, f"{seed}/whole {name}", metrics["loss"], gradients["actor"])
    if config.algorithm == "ppo":
        agree(batch, oracle, f"{seed}/whole {name} critic", metrics["value_loss"], gradients["critic"])


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if not random_batch(seed).wild])  # TRL bounds no log-ratio
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_a_step_by_trls_convention_is_trls(oracle: Oracle, seed: int, name: str) -> None:
    batch = random_batch(seed)
    norm = {"norm_tokens": batch.mask_BL.shape[1]} if name == "dr_grpo" else {}
    config = TrainerConfig(**{"micro_tokens": 60, "batch_groups": 5, "algorithm": name, "convention": "trl", **norm})
    metrics, gradients = play(batch, config, cut=5)
    agree(batch, oracle, f"{seed}/whole trl {name}", metrics["loss"], gradients["actor"])


def agree(batch: Padded, oracle: Oracle, name: str, loss: float, gradient_BL: np.ndarray) -> None:
    theirs = oracle[f"{name}/gradient"]
    assert np.abs(theirs).max() > 0
    np.testing.assert_allclose(loss, oracle[f"{name}/value"], rtol=2e-5, atol=1e-7, err_msg=name)
    np.testing.assert_allclose(gradient_BL, theirs, rtol=2e-5, atol=2e-6 * np.abs(theirs).max(), err_msg=name)
