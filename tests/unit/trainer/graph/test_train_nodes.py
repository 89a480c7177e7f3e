"""Training of actor and critic: the terms around a loss, a user's loss, a critic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_helpers import learner, learners, random_rows, small_model

from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError, GraphError
from rillflow.trainer.batches import Databuffer, Rows
from rillflow.trainer.graph.worker import Worker


def unrewarded(seed: int = 1) -> Rows:
    """Every advantage is 0: only what is around the loss is learnt."""
    rows = random_rows(seed)
    return replace(rows, reward_R=rows.group_mean_R.copy())


def own_logprobs(rows: Rows) -> Rows:
    """As the small model itself would have sampled them."""
    config = TrainerConfig()
    old_N = learners(config)["actor"].infer(Databuffer(rows))
    return replace(rows, old_N=old_N)


def same(one: Worker, other: Worker) -> bool:
    mine, theirs = one.masters(), other.masters()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


# ---------------------------------------------------------------- terms


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_unbounded"])
def test_a_distance_in_the_loss_pulls_back_to_the_reference(estimator: str) -> None:
    rows = unrewarded()
    trained = learner(kl={"coefficient": 1.0, "estimator": estimator}, weight_decay=0.0, lr=0.03)
    first = trained.step([rows])
    assert first["loss"] == pytest.approx(first["kl"], rel=0.5)
    for _ in range(7):
        last = trained.step([rows])
    assert last["kl"] < 0.3 * first["kl"]


def test_a_distance_in_the_reward_is_charged_to_each_row() -> None:
    rows = random_rows(1)
    free, priced = learner(), learner(kl={"coefficient": 1.0, "where": "reward"})
    assert priced.step([rows])["kl"] > 0
    assert "kl" not in free.step([rows])
    assert not same(free, priced)


def test_an_entropy_bonus_raises_the_entropy() -> None:
    rows = unrewarded()
    trained = learner(entropy=1.0, weight_decay=0.0)
    first = trained.step([rows])
    assert first["loss"] < 0
    for _ in range(10):
        last = trained.step([rows])
    assert last["entropy"] > first["entropy"] + 0.1


def test_truncated_weights_are_one_where_engine_and_trainer_agree() -> None:
    rows = own_logprobs(random_rows(2))
    plain, truncated = learner(), learner(truncate=2.0)
    one, other = plain.step([rows]), truncated.step([rows])
    assert other["tis"] == pytest.approx(1, abs=1e-5)
    assert other["tis_truncated"] == 0
    assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_truncated_weights_are_bounded() -> None:
    rows = own_logprobs(random_rows(2))
    away = replace(rows, old_N=(rows.old_N - np.where(rows.mask_N, 3.0, 0.0)).astype(np.float32))
    metrics = learner(truncate=2.0).step([away])
    assert metrics["tis"] == pytest.approx(2)
    assert metrics["tis_truncated"] == 1
    assert metrics["clip_high"] == 0, "the clip is around the weights before the update"


@pytest.mark.parametrize("algorithm", ["m2po", "gspo", "decoupled_ppo", "reinforce"])
def test_terms_go_around_every_loss(algorithm: str) -> None:
    rows = random_rows(2)
    metrics = learner(algorithm=algorithm, truncate=2.0, kl={"coefficient": 0.1}, entropy=0.01).step([rows])
    assert {"tis", "tis_truncated", "kl"} <= set(metrics)
    assert metrics["skipped"] == 0


# ---------------------------------------------------------------- a loss of one's own


LOSSES = """
import torch

from rillflow.trainer.graph import function


def clipped(tokens):
    r = torch.exp(tokens.new_T - tokens.old_T)
    a = tokens.advantage_T
    loss = torch.maximum(-a * r, -a * r.clamp(0.8, 1.2))
    return torch.where(a < 0, torch.minimum(loss, -a * 3.0), loss)


def weighted(tokens):
    return -tokens.advantage_T * tokens.new_T * tokens.more["care_T"]


@function("care", role="reward", kind="compute", needs=["staleness_R", "length_R"], gives=["care_N"])
def care(step, data):
    return {"care_N": 1.0 / (1.0 + data["staleness_R"][data.row_N])}


def short(tokens):
    return tokens.new_T.sum()


def cut_off(tokens):
    return -tokens.advantage_T * tokens.new_T.detach()


number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "losses.py"
    path.write_text(LOSSES)
    return str(path)


def test_a_loss_of_ones_own_takes_the_algorithms_place(file: str) -> None:
    rows = random_rows(3)
    built_in, own = learner(), learner(loss=f"{file}:clipped")
    one, other = built_in.step([rows]), own.step([rows])
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert (other["clip_low"], other["clip_high"]) == (0, 0)


def test_a_loss_of_ones_own_sees_the_columns_of_ones_own_nodes(file: str) -> None:
    rows = random_rows(3)
    trained = learner(loss=f"{file}:weighted", nodes=[f"{file}:care"], truncate=2.0)
    assert trained.step([rows])["skipped"] == 0


def test_a_loss_that_is_not_of_tokens_is_refused(file: str) -> None:
    with pytest.raises(ConfigError, match="for 4"):
        learner(loss=f"{file}:short").step([random_rows(3)])
    with pytest.raises(ConfigError, match="not a function"):
        learner(loss=f"{file}:number")


def test_a_loss_without_a_gradient_is_refused(file: str) -> None:
    with pytest.raises(ConfigError, match="has no gradient"):
        learner(loss=f"{file}:cut_off").step([random_rows(3)])


# ---------------------------------------------------------------- the critic


PPO: dict[str, Any] = {"algorithm": "ppo", "lr": 3e-3, "weight_decay": 0.0}


def test_the_critic_learns_the_returns() -> None:
    rows = random_rows(1)
    trained = learner(**PPO, critic={"value_clip": 10.0})
    steps = [trained.step([rows]) for _ in range(30)]
    assert steps[-1]["value_loss"] < 0.5 * steps[0]["value_loss"]
    assert steps[-1]["explained_variance"] > 0.5 > steps[0]["explained_variance"]
    returns = [each["return_mean"] for each in steps]
    # With gamma = lambda = 1 a return is the row's reward, whatever the critic says.
    assert returns == pytest.approx([returns[0]] * len(returns), abs=1e-4)


def test_values_move_no_further_than_their_clip_for_nothing() -> None:
    far = learner(**PPO | {"lr": 0.1, "epochs": 4}, critic={"value_clip": 1e-3})
    assert far.step([random_rows(1)])["value_clip"] > 0


def test_only_the_critic_learns_while_it_warms_up() -> None:
    rows = random_rows(1)
    model = small_model()
    trained = learner(model, **PPO, critic={"warmup_batches": 2})
    before = [parameter.clone() for parameter in model.parameters()]
    for number in range(3):
        metrics = trained.step([rows])
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved is (number == 2)
        assert ("loss" in metrics) is (number == 2)
        assert metrics["critic_skipped"] == 0
    assert trained.steps == 3


def test_actor_and_critic_go_on_exactly() -> None:
    batches = [random_rows(seed) for seed in range(4)]
    straight, first = learner(in_order=True, **PPO), learner(in_order=True, **PPO)
    for rows in batches:
        straight.step([rows])
    for rows in batches[:2]:
        first.step([rows])
    second = learner(small_model(seed=9), in_order=True, **PPO)
    second.restore(first.masters(), first.moments(), first.steps)
    assert any(name.startswith("critic/") for name in second.masters())
    for rows in batches[2:]:
        second.step([rows])
    assert same(straight, second)


@pytest.mark.parametrize(
    ("nodes", "settings", "said"),
    [
        (["advantages"], {"kl": {}}, "needs reference_N"),
        (["advantages"], {"truncate": 2.0}, "needs proximal_N"),
        (["punish_overlong", "group_statistics", "advantages"], {}, "needs trainer.overlong"),
        (["reference_logprobs", "kl_reward", "advantages"], {}, "needs trainer.kl"),
        (["advantages"], {"algorithm": "ppo"}, "use the function gae"),
    ],
)
def test_a_graph_that_does_not_fit_its_options_says_so(nodes: list[str], settings: Any, said: str) -> None:
    with pytest.raises(GraphError) as caught:
        learner(graph=["fetch", *nodes, "train_actor", "publish"], **settings).step([random_rows(1)])
    assert said in f"{caught.value.message} {caught.value.hint}"


def test_a_role_that_cannot_be_trained_is_named() -> None:
    config = TrainerConfig(algorithm="ppo")
    worker = learner(algorithm="ppo")
    models = learners(config)
    models["critic"].optimizer = None
    broken = Worker(worker._chain, models, worker._algorithm, config, worker._peers)
    with pytest.raises(GraphError, match="no critic that can be trained"):
        broken.step([random_rows(1)])
