"""The process reward model beside the episodes: the trainer's numbers, batched, and never a made-up reward."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from flow_world import FIRST, NO, PAYLOAD, played, says

from rillflow.agents.agentflow.actions import parse
from rillflow.agents.agentflow.prm_text import prm_row
from rillflow.agents.rewards.process import ProcessReward
from rillflow.errors import ConfigError, RewardError
from rillflow.trainer.supervised.reward_model import RewardModel
from rillflow.weights.models import load_scalar_model, load_tokenizer

ROWS = [
    {"prompt": "How many pens?\n", "steps": [{"text": "a > search: red pens"}, {"text": "b > answer: 12"}]},
    {"prompt": "How many cups are in the red box?\n", "steps": [{"text": "think > think: more"}]},
]


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
    expected = RewardModel.load(folder, device="cpu").score_steps(ROWS)
    found = await ProcessReward(folder, device="cpu").score(ROWS, 60)
    assert [len(row) for row in found] == [2, 1]
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


def test_a_folder_that_is_no_process_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no process reward model"):
        ProcessReward("tiny", device="cpu")


async def test_each_answer_of_the_planner_gets_its_own_score_and_malformed_ones_nothing(folder: str) -> None:
    texts = [says("search", FIRST), says("answer", "12")]
    seen = await played("no JSON", texts[0], NO, texts[1], process_reward=folder)
    decisions = [decision for text in texts if (decision := parse(text))]
    (scores,) = await ProcessReward(folder, device="cpu").score([prm_row(PAYLOAD["question"], decisions)], 60)
    rewards = [sample.reward for sample in seen.record.samples("planner")]
    assert rewards[0] == 0.0
    assert rewards[2] is None
    assert [rewards[1], rewards[3]] == pytest.approx(scores, abs=1e-5)


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
    await asyncio.gather(*(played(says("answer", "12"), process_reward=folder) for _ in range(4)))
    assert len(threads) == 1
    assert threads[0] != threading.main_thread().name


async def test_evaluations_need_no_process_reward(folder: str) -> None:
    seen = await played(says("answer", "12"), process_reward="nowhere", lane="eval")
    assert [sample.reward for sample in seen.record.samples("planner")] == [None]
