"""An error of user code arrives with its line and, once, with its traceback; later ones are counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from rollout_support import World

from rillflow.contracts import Episode
from rillflow.errors import RewardError
from rillflow.rollout import tracebacks
from rillflow.rollout.tracebacks import Tracebacks, place_of


async def silent(episode: Episode) -> str:
    await episode.role("agent").ask([{"role": "user", "content": "hello"}])
    return "said"


def divides(payload: dict[str, Any]) -> float:
    return len(payload["question"]) / 0  # the line that is told


async def broken_workflow(episode: Episode) -> float:
    return divides(episode.payload)


async def broken_reward(payload: dict[str, Any], answer: Any) -> float:
    return divides(payload)


def broken_plain_reward(payload: dict[str, Any], answer: Any) -> float:
    return divides(payload)


@pytest.mark.parametrize(
    ("workflow", "reward", "cause"),
    [
        (broken_workflow, None, "workflow_error"),
        (silent, broken_reward, "reward_error"),
        (silent, broken_plain_reward, "reward_error"),
    ],
)
async def test_the_first_traceback_is_logged_and_later_ones_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workflow: Any, reward: Any, cause: str
) -> None:
    with caplog.at_level(logging.WARNING, "rillflow.rollout.push"):
        async with World(tmp_path, 3, workflow=workflow, reward=reward, episodes=1) as world:
            await world.dataflow.until(3)
    line = divides.__code__.co_firstlineno + 1
    for failed in world.dataflow.failed:
        assert failed.cause == cause
        assert failed.error == f"ZeroDivisionError: division by zero (test_tracebacks.py:{line} in divides)"
    first, second, third = (record.getMessage() for record in caplog.records if "failed" in record.getMessage())
    assert first.count("Traceback (most recent call last)") == 1
    assert "# the line that is told" in first
    assert "_shielded" not in first, "it begins with the user's own line"
    assert second.endswith("(2 times so far; the traceback of the first is above)")
    assert "(3 times so far" in third
    assert "Traceback" not in second + third


def raised(function: Any, *arguments: Any) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*arguments)
    return caught.value


def test_other_lines_are_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Tracebacks()
    assert "ZeroDivisionError" in seen.told(raised(divides, {"question": "one"}))
    assert "KeyError" in seen.told(raised(divides, {}))
    assert seen.told(raised(divides, {"question": "two"})).startswith(" (2 times so far")
    monkeypatch.setattr(tracebacks, "_MOST", 2)
    assert seen.told(raised(divides, {"question": None})) == ""
    assert seen.told(None) == ""


def test_what_our_own_code_refuses_needs_no_traceback() -> None:
    ours = RewardError("no reward", "give one")
    assert (Tracebacks().told(ours), place_of(ours)) == ("", "")
