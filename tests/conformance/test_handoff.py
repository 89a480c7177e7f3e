"""openai-agents hands a question from one agent to another: other tools, another path, and each answer trains once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_play import SCRIPTS, play, python_of
from teaching import Lesson, calls, taught
from transformers import PreTrainedModel

from engine_log import trained_turns
from rillflow.config import SamplingConfig
from rillflow.examples.stockroom import TOOLS, count, prompts

pytestmark = pytest.mark.agents

TRANSFER = [{"type": "function", "function": {"name": "transfer_to_counter", "parameters": {}}}]


def lessons(payload: dict[str, Any]) -> list[Lesson]:
    """The desk hands over; the counter, which sees that in its history, counts and answers."""
    asked = {"box": payload["box"], "item": payload["item"]}
    handed = [
        {"role": "user", "content": payload["question"]},
        calls("transfer_to_counter"),
    ]
    counted = [
        {"role": "tool", "content": '{"assistant": "counter"}'},
        calls("count", **asked),
        {"role": "tool", "content": count(payload, asked)},
        {"role": "assistant", "content": count(payload, asked)},
    ]
    return [Lesson(TRANSFER, handed), Lesson([dict(tool) for tool in TOOLS], [*handed, *counted])]


@pytest.fixture(scope="module")
def payload() -> dict[str, Any]:
    (row,) = prompts("train", 1, 5)
    return dict(row["payload"])


@pytest.fixture(scope="module")
def command() -> list[Any]:
    return [python_of("openai-agents"), SCRIPTS / "openai_agents_sdk.py"]


@pytest.fixture(scope="module")
def model(command: list[Any], payload: dict[str, Any]) -> PreTrainedModel:
    """Made only where there is something that can play it."""
    return taught(lessons(payload))


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_handoff_between_two_agents(
    api: str, command: list[Any], payload: dict[str, Any], model: PreTrainedModel, tmp_path: Path
) -> None:
    greedy = SamplingConfig(temperature=0)
    played = await play([*command, f"{api}-handoff"], {"questions": [payload]}, model, tmp_path, sampling=greedy)
    played.check()
    (episode,) = played.told
    assert [call[1] for turn in episode for call in turn["calls"]] == ["transfer_to_counter", "count"]
    assert episode[-1]["text"] == str(payload["stock"][payload["box"]][payload["item"]])
    assert [len(trained_turns(sample)) for sample in played.samples] == [1, 2]
