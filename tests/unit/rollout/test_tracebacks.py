"""An error of user code arrives with its line and, once, with its traceback; later ones are counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from rollout_support import World

from rillflow.agents.tools.functions import tool_of
from rillflow.agents.tools.toolbox import OpenToolbox
from rillflow.config import tracebacks
from rillflow.config.tracebacks import Tracebacks, UserErrors, place_of
from rillflow.contracts import Episode
from rillflow.errors import RewardError
from rillflow.rollout.episode import Surroundings
from rillflow.types import Observation


async def silent(episode: Episode) -> str:
    await episode.role("agent").ask([{"role": "user", "content": "hello"}])
    return "said"


def divides(payload: dict[str, Any]) -> float:
    return len(payload["question"]) / 0  # the reported line


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
    assert "# the reported line" in first
    assert "_shielded" not in first, "it begins with the user's own line"
    assert second.endswith("(2 times so far; the traceback of the first is above)")
    assert "(3 times so far" in third
    assert "Traceback" not in second + third
    told = [error for failed in world.dataflow.failed for error in failed.errors]
    assert {(error.kind, error.where, error.count) for error in told} == {
        (cause, f"ZeroDivisionError test_tracebacks.py:{line} in divides", 1)
    }
    assert ["# the reported line" in error.trace for error in told] == [True, False, False]


def counts(box: str) -> int:
    """Count."""
    return {"red": 1}[box]  # the tool's line


async def uses_a_tool(episode: Episode) -> float:
    await episode.role("agent").ask([{"role": "user", "content": "hello"}])
    for _ in range(2):
        assert await episode.tools.call("counts", {"box": "blue"}, episode) == "error: KeyError: 'blue'"
    return 1.0


class Leaky:
    """An environment that cannot be closed."""

    async def reset(self, payload: Any, seed: int) -> Observation:
        return Observation(text="a room")

    async def step(self, action: str) -> Observation:
        raise LookupError("no door")  # the environment's line

    async def close(self) -> None:
        raise OSError("stuck")


async def enters(episode: Episode) -> float:
    await episode.role("agent").ask([{"role": "user", "content": "hello"}])
    await episode.environment.reset({}, 1)
    await episode.environment.step("go")
    return 1.0


async def test_errors_of_tools_and_environments_are_told_with_the_next_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors = UserErrors()
    place = Surroundings(tools=OpenToolbox([tool_of(counts)], errors=errors), environment=Leaky, errors=errors)
    with caplog.at_level(logging.WARNING):
        async with World(tmp_path / "tool", 2, workflow=uses_a_tool, surroundings=place, episodes=1) as world:
            await world.dataflow.until(2)
        (first,), (second,) = (done.errors for done in world.dataflow.done)
        async with World(tmp_path / "world", 1, workflow=enters, surroundings=place, episodes=1) as world:
            await world.dataflow.until(1)
    assert (first.kind, first.count, second.count) == ("tool counts", 2, 2)
    assert ("# the tool's line" in first.trace, second.trace) == (True, "")
    assert caplog.text.count("# the tool's line") == 1
    assert "(4 times so far" in caplog.text
    told = {error.kind: error for error in world.dataflow.failed[0].errors}
    assert "# the environment's line" in told["workflow_error"].trace
    assert told["environment"].where.startswith("OSError test_tracebacks.py")


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
