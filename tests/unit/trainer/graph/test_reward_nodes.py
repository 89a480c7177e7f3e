"""From the rows of a batch to advantages, node by node, on one rank and on several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from trainer_helpers import random_rows, random_samples

from peer_threads import as_peers
from rillflow.clients.payloads import DamagedRows
from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.batches import TRAINED_COLUMNS, Databuffer, Rows, columns_of, make_rows
from rillflow.trainer.graph.rows import (
    advantage_function,
    advantages,
    batch_advantages,
    fetch,
    gae,
    group_statistics,
    punish_overlong,
)
from rillflow.trainer.graph.worker import Step
from rillflow.trainer.parallel import Alone, Peers

NAN = float("nan")


def step(rows: Rows | None = None, peers: Peers = Alone(), **settings: Any) -> Step:
    config = TrainerConfig(**settings)

    def parts() -> Iterator[Databuffer]:
        assert rows is not None
        yield Databuffer(rows)

    return Step(
        number=0, config=config, algorithm=ALGORITHMS[config.algorithm](config), models={}, peers=peers, fetch=parts,
        generate=parts, publish=lambda: None, check=lambda: None,
    )  # fmt: skip


def rewarded(seed: int = 1) -> Rows:
    """Rows of which most tokens that train end an answer with a reward of its own."""
    samples, payload = random_samples(seed)
    rng = np.random.default_rng(seed)
    for arrays in payload:
        given = (arrays["mask"] > 0) & (rng.random(len(arrays["mask"])) < 0.7)
        arrays["rewards"] = np.where(given, rng.random(len(given)), NAN).astype("<f4")
    return make_rows(samples, payload)


def on_ranks(rows: Rows, column: str, run: Any, **settings: Any) -> np.ndarray:
    """Return the column that three ranks compute, in the order of the whole batch; groups are split among ranks."""
    whole = Databuffer(rows)

    def work(peers: Peers) -> tuple[np.ndarray, np.ndarray]:
        mine = np.arange(peers.rank, len(whole), 3)
        data = whole.taking(mine)
        found = run(step(peers=peers, **settings), data)[column]
        index_N = np.concatenate([np.flatnonzero(whole.row_N == row) for row in mine])
        return (index_N if column.endswith("_N") else mine), found

    joined = np.zeros(len(whole[column.replace("advantage_N", "mask_N")]))
    for index, found in as_peers(3, work):
        joined[index] = found
    return joined


# ---------------------------------------------------------------- rows


def test_rewards_of_answers_are_read_where_the_recipe_wants_them() -> None:
    assert columns_of(TrainerConfig()) == TRAINED_COLUMNS
    assert columns_of(TrainerConfig(step_rewards="own")) == (*TRAINED_COLUMNS, "rewards")
    assert np.isnan(random_rows(1).step_reward_N).all()
    assert 0 < np.isnan(rewarded().step_reward_N).sum() < len(rewarded().step_reward_N)


def test_a_reward_of_an_answer_that_is_not_finite_is_damage() -> None:
    samples, payload = random_samples(1)
    payload[3]["rewards"] = np.full(samples[3].tokens, np.inf, "<f4")
    with pytest.raises(DamagedRows) as caught:
        make_rows(samples, payload)
    assert caught.value.rows == [samples[3].row]


def test_the_source_notes_what_rows_say_before_they_are_filtered() -> None:
    rows = random_rows(5)
    rows = replace(rows, group_std_R=np.where(rows.member_R == 1, 0.0, rows.group_std_R))
    one = step(rows, overlong_filter=True)
    (data,) = fetch(one)
    assert not data["mask_N"][rows.truncated_R[data.row_N]].any()
    np.testing.assert_array_equal(data["answer_R"], rows.trained_R)
    assert one.metrics["zero_variance"] == pytest.approx(1 / 3)
    assert one.metrics["response_length"] == rows.trained_R.mean()
    assert one.metrics["reward_std"] == pytest.approx(rows.reward_R.std())
    assert one.metrics["truncated"] == rows.truncated_R.mean() > 0
    assert one.metrics["staleness_max"] == rows.staleness_R.max()


# ---------------------------------------------------------------- rewards


def test_long_answers_are_punished_by_what_was_sampled() -> None:
    rows = random_rows(2)
    one = step(rows, overlong={"longest": 6, "margin": 4})
    (data,) = fetch(one)
    punished_R = rows.reward_R - punish_overlong(one, data)["reward_R"]
    expected = [0.0 if n <= 2 else 1.0 if n >= 6 else (n - 2) / 4 for n in rows.trained_R]
    np.testing.assert_allclose(punished_R, expected)


def test_statistics_of_changed_rewards_are_those_of_the_groups() -> None:
    rows = random_rows(3)
    changed = Databuffer(replace(rows, reward_R=rows.reward_R * 2 + rows.length_R))
    made = group_statistics(step(), changed)
    for member in range(3):
        mine = changed["reward_R"][rows.member_R == member]
        np.testing.assert_allclose(made["group_mean_R"][rows.member_R == member], mine.mean())
        np.testing.assert_allclose(made["group_std_R"][rows.member_R == member], mine.std())
    np.testing.assert_array_equal(made["group_size_R"], rows.group_size_R)
    for column, values in made.items():
        np.testing.assert_allclose(on_ranks(changed.rows, column, group_statistics), values)


def test_rows_that_the_ledger_compares_apart_stay_apart() -> None:
    """Two agents in one group of the batch, whose rewards as played were equal: each still has its own statistics."""
    rows = random_rows(3)
    agent_R = np.arange(len(rows.length_R)) % 2
    apart = replace(rows, alike_R=agent_R, group_size_R=np.full_like(rows.group_size_R, 2))
    made = group_statistics(step(), Databuffer(apart))
    for member in range(3):
        for agent in range(2):
            mine = (rows.member_R == member) & (agent_R == agent)
            np.testing.assert_allclose(made["group_mean_R"][mine], rows.reward_R[mine].mean())
            np.testing.assert_array_equal(made["group_size_R"][mine], 2)


# ---------------------------------------------------------------- advantages


def test_one_advantage_a_row() -> None:
    rows = random_rows(1)
    one = step()
    value_N = advantages(one, Databuffer(rows))["advantage_N"]
    assert one.algorithm.advantage is not None
    np.testing.assert_array_equal(value_N, np.repeat(one.algorithm.advantage(rows), rows.length_R))


def test_whitened_over_all_trained_tokens_of_all_ranks() -> None:
    rows = random_rows(1)
    settings: dict[str, Any] = {"algorithm": "reinforce_plus_plus"}
    value_N = batch_advantages(step(**settings), Databuffer(rows))["advantage_N"]
    assert value_N[rows.mask_N].mean() == pytest.approx(0, abs=1e-12)
    assert value_N[rows.mask_N].var(ddof=1) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(on_ranks(rows, "advantage_N", batch_advantages, **settings), value_N)


@pytest.mark.parametrize("how", ["own", "to_go"])
def test_answers_are_compared_with_all_answers_of_their_group(how: str) -> None:
    """Written out, answer by answer."""
    rows = rewarded()
    one = step(step_rewards=how)
    value_N = batch_advantages(one, Databuffer(rows))["advantage_N"]
    there_N = ~np.isnan(rows.step_reward_N)
    assert one.metrics["rewarded_answers"] == there_N.sum()
    member_N = np.repeat(rows.member_R, rows.length_R)
    for start, length in zip(rows.start_R, rows.length_R, strict=True):
        answers = [n for n in range(start, start + length) if there_N[n]]
        worth = {}
        for n in answers:
            peers = rows.step_reward_N[there_N & (member_N == member_N[n])].astype(float)
            worth[n] = (rows.step_reward_N[n] - peers.mean()) / (peers.std(ddof=1) + 1e-6)
        for n in range(start, start + length):
            later = [worth[m] for m in answers if m >= n] or [0.0]
            expected = later[0] if how == "own" else sum(later)
            assert value_N[n] == pytest.approx(expected if rows.mask_N[n] else 0.0, rel=1e-6, abs=1e-9)
    np.testing.assert_allclose(on_ranks(rows, "advantage_N", batch_advantages, step_rewards=how), value_N)


def test_a_batch_without_rewarded_answers_teaches_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    made = batch_advantages(step(step_rewards="own"), Databuffer(random_rows(1)))
    assert not made["advantage_N"].any()
    assert "no answer of this batch has a reward" in caplog.text


def test_a_critic_hears_of_the_rewards_of_answers() -> None:
    """With a critic that expects nothing, returns are what is still to come."""
    rows = rewarded()
    data = Databuffer(rows).adding({"value_N": np.zeros(len(rows.mask_N))})
    return_N = gae(step(algorithm="ppo", step_rewards="to_go"), data)["return_N"]
    for start, length in zip(rows.start_R, rows.length_R, strict=True):
        trained = [n for n in range(start, start + length) if rows.mask_N[n]]
        for n in trained:
            assert return_N[n] == pytest.approx(np.nansum([rows.step_reward_N[m] for m in trained if m >= n]), abs=1e-6)


def test_which_function_makes_the_advantages() -> None:
    reward = {"where": "reward"}
    assert advantage_function(TrainerConfig()) == "advantages"
    assert advantage_function(TrainerConfig(kl={})) == "advantages"
    assert advantage_function(TrainerConfig(kl=reward)) == "batch_advantages"
    assert advantage_function(TrainerConfig(step_rewards="own")) == "batch_advantages"
    assert advantage_function(TrainerConfig(advantage="grpo_whitened")) == "batch_advantages"
    assert advantage_function(TrainerConfig(algorithm="ppo", kl=reward)) == "gae"
    with pytest.raises(ConfigError, match="compared with each other"):
        advantage_function(TrainerConfig(step_rewards="own", kl=reward))
    with pytest.raises(ConfigError, match="from its critic"):
        advantage_function(TrainerConfig(algorithm="ppo", advantage="grpo"))
    with pytest.raises(ConfigError, match="add up"):
        advantage_function(TrainerConfig(algorithm="ppo", step_rewards="own"))
