"""The process reward model beside the episodes: the trainer's numbers, batched, and never a made-up reward."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from flow_world import FIRST, NO, PAID, PAYLOAD, played, says

from rillflow.agents.agentflow.labels import states_of
from rillflow.agents.agentflow.loop import check_recipe
from rillflow.agents.agentflow.models import Decision, parse, prm_row
from rillflow.agents.rewards.process import ProcessReward
from rillflow.config import load_recipe
from rillflow.errors import ConfigError, RewardError
from rillflow.rollout.loading import check_players
from rillflow.trainer.supervised.reward_model import RewardModel
from rillflow.weights.model_folder import FILE, Quality, RewardFacts
from rillflow.weights.models import load_scalar_model, load_tokenizer

ROWS = [
    {"prompt": "How many pens?\n", "steps": [{"text": "a > search: red pens"}, {"text": "b > answer: 12"}]},
    {"prompt": "How many cups are in the red box?\n", "steps": [{"text": "think > think: more"}]},
]
SAID = [prm_row("How many pens?", Decision("a", "search", "red pens")), prm_row("How?", Decision("b", "answer", "1"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a new head, as large as any that was trained."""
    torch.manual_seed(3)
    made = tmp_path_factory.mktemp("prm")
    model, _ = load_scalar_model("tiny", "fp32", torch.device("cpu"))
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.config.pad_token_id = 0
    model.save_pretrained(made)
    load_tokenizer("tiny").save_pretrained(made)
    (made / "rillflow.json").write_text(json.dumps({"task": "process_reward", "loss": "bce", "separator": "\n"}))
    return str(made)


async def test_it_gives_the_numbers_of_the_trainers_reward_model(folder: str) -> None:
    rows = [*ROWS, *SAID]
    expected = RewardModel.load(folder, device="cpu").score_steps(rows)
    found = await ProcessReward(folder, device="cpu").score(rows, 60)
    assert [len(row) for row in found] == [2, 1, 1, 1]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


async def test_rows_that_come_together_share_a_pass_and_score_as_they_do_alone(folder: str) -> None:
    model = ProcessReward(folder, device="cpu")
    alone = [(await model.score([row], 60))[0] for row in ROWS]
    together = await asyncio.gather(*(model.score([row], 60) for row in ROWS * 8))
    for mine, other in zip(together, alone * 8, strict=True):
        assert mine[0] == pytest.approx(other, abs=1e-5)


async def test_too_late_and_too_long_are_no_reward(folder: str) -> None:
    model = ProcessReward(folder, device="cpu")
    with pytest.raises(RewardError, match="took longer"):
        await model.score(ROWS, 0.0)
    with pytest.raises(RewardError, match="reads 512"):
        await model.score([{"prompt": "x" * 4000, "steps": [{"text": "y"}]}], 60)


def test_a_folder_that_is_not_a_process_reward_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a process reward model"):
        ProcessReward("tiny", device="cpu")


@pytest.mark.parametrize(
    ("quality", "said"),
    [
        (None, "never measured"),
        (Quality(0.5, 0.0, 0, 0.1), "never measured"),
        (Quality(0.58, 0.09, 40, 0.1), "0.58 ± 0.09 of 40"),
        (Quality(0.58, 0.02, 400, 0.1), ""),
    ],
)
def test_a_model_that_does_not_rank_above_chance_is_refused_by_name(
    folder: str, tmp_path: Path, quality: Quality | None, said: str
) -> None:
    made = shutil.copytree(folder, tmp_path / "prm")
    (made / FILE).write_bytes(msgspec.json.encode(RewardFacts(task="process_reward", quality=quality)))
    recipe = load_recipe("agentflow_pro", [f"options.process_reward.model={made}"])
    ungated = load_recipe(
        "agentflow_pro", [f"options.process_reward.model={made}", "options.process_reward.gate=false"]
    )
    assert check_recipe(ungated) is None
    if not said:
        assert check_recipe(recipe) is None
        return
    with pytest.raises(ConfigError, match=said) as caught:
        check_recipe(recipe)
    assert str(made) in str(caught.value)


@pytest.mark.parametrize(
    ("calibration", "outcome", "warned"), [(0.14, 0.5, True), (0.14, 0.0, False), (0.07, 0.5, False)]
)
def test_scores_on_another_scale_than_outcomes_are_warned_of(
    folder: str, tmp_path: Path, *, calibration: float, outcome: float, warned: bool
) -> None:
    made = shutil.copytree(folder, tmp_path / "prm")
    facts = RewardFacts(task="process_reward", quality=Quality(0.7, 0.02, 400, calibration))
    (made / FILE).write_bytes(msgspec.json.encode(facts))
    changed = [f"options.process_reward.model={made}", f"options.process_reward.outcome={outcome}"]
    said = check_players(load_recipe("agentflow_pro", changed))
    assert (said is not None) == warned
    if said is not None:
        assert "0.14 from their labels" in said
        assert "--no-balance" in said


async def test_each_answer_of_the_planner_gets_its_own_score_and_malformed_ones_nothing(folder: str) -> None:
    texts = [says("search", FIRST), says("answer", "12")]
    seen = await played("no JSON", texts[0], NO, texts[1], process_reward={"model": folder, "actions": 1})
    decisions = [decision for text in texts if (decision := parse(text))]
    states = [state.prompt for state in states_of(seen.record.transcript())]
    rows = [prm_row(state, decision) for state, decision in zip(states, decisions, strict=True)]
    scores = [score for (score,) in await ProcessReward(folder, device="cpu").score(rows, 60)]
    assert str(PAYLOAD["stock"][PAYLOAD["boxes"][0]][PAYLOAD["item"]]) in states[1], "the result of the first decision"
    assert seen.rewards("verifier") == [None]
    malformed, *rewards = seen.rewards()
    assert malformed == 0.0
    assert rewards == pytest.approx(scores, abs=1e-5)


async def test_the_outcome_is_mixed_in_where_it_is_known(folder: str) -> None:
    look, other, right, wrong = (
        says("search", FIRST),
        says("think", "hm"),
        says("answer", PAID),
        says("answer", "1+1=2"),
    )
    common: dict[str, Any] = {"verifier": "none", "check": "rillflow.examples.tally:reward"}
    script = (look, other, wrong, right)
    plain, mixed = [
        (
            await played(
                *script, process_reward={"model": folder, "actions": 2, "least": 0.0, "outcome": weight}, **common
            )
        )
        for weight in (0.0, 0.5)
    ]
    scores, rewards = plain.rewards(), mixed.rewards()
    assert rewards[0] == pytest.approx(scores[0] / 2, abs=1e-5), "it was carried out, and the episode failed"
    assert rewards[1] == pytest.approx(scores[1], abs=1e-5), "nobody knows what would have come of it"
    assert rewards[2:] == [0.0, 1.0], "an answer ends the episode: it is worth its outcome, given or not"


async def test_a_last_step_without_an_answer_is_worth_nothing_whatever_its_score(folder: str) -> None:
    seen = await played(
        says("search", FIRST), says("think", "hm"), says("answer", PAID), max_steps=1, verifier="none",
        check="rillflow.examples.tally:reward", fallback=False,
        process_reward={"model": folder, "actions": 3, "least": 0.0, "outcome": 0.5},
    )  # fmt: skip
    assert seen.rewards() == [0.0, 0.0, 1.0]


async def test_however_many_episodes_end_at_once_the_model_is_loaded_once_and_beside_the_loop(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    @cache
    def slow(folder: str) -> ProcessReward:
        threads.append(threading.current_thread().name)
        time.sleep(0.3)
        return ProcessReward(folder, device="cpu")

    monkeypatch.setattr(ProcessReward, "shared", staticmethod(slow))
    await asyncio.gather(
        *(played(says("answer", "12"), process_reward={"model": folder, "actions": 1}) for _ in range(4))
    )
    assert len(threads) == 1
    assert threads[0] != threading.main_thread().name


async def test_evaluations_need_no_process_reward(folder: str) -> None:
    seen = await played(says("answer", "12"), process_reward={"model": "nowhere"}, lane="eval")
    assert [sample.reward for sample in seen.record.samples("planner")] == [None]
