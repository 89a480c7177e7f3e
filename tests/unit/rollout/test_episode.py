"""Every way in which a user's code can go wrong ends in a cause, never in a reward of 0."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import openai
import pytest

from rillflow.agents.rewards.base import Given
from rillflow.config.tracebacks import UserErrors
from rillflow.contracts import Episode, SystemClock
from rillflow.errors import WorkflowError
from rillflow.rollout.episode import MOST_METRICS, EpisodeFailed, RunningEpisode, Surroundings, play, score
from rillflow.types import Prompt, Scored, Task


def episode(seconds: float = 5.0, give: Any = None, surroundings: Surroundings | None = None) -> RunningEpisode:
    task = Task(id="t.0", prompt=Prompt(id="p", payload={"x": 1}), group="t", place=0, lane="train", seed=3)
    client = openai.AsyncOpenAI(api_key="x", base_url="http://127.0.0.1:1")
    return RunningEpisode(
        task, client=client, policies=["agent"], url="http://127.0.0.1:1/s/a", api_key="k",
        clock=SystemClock(), seconds=seconds, give=give, surroundings=surroundings,
    )  # fmt: skip


def test_what_a_workflow_sees() -> None:
    world: Any = object()
    running = episode(surroundings=Surroundings(environment=lambda: world))
    assert isinstance(running, Episode)
    assert running.environment is running.environment is world
    assert (running.payload, running.model, running.seed) == ({"x": 1}, "agent", 3)
    assert str(running.client.base_url) == "http://127.0.0.1:1/s/a/v1/"
    assert running.anthropic_url == "http://127.0.0.1:1/s/a"
    assert 0 < running.seconds_left() <= 5


def test_a_client_for_one_of_several_agents() -> None:
    running = episode()
    client = running.agent("checker")
    assert client.default_headers["x-rillflow-agent"] == "checker"
    assert client.base_url == running.client.base_url
    assert "x-rillflow-agent" not in running.client.default_headers


def test_a_workflow_gives_rewards_to_parts_of_its_session() -> None:
    given: list[Any] = []
    running = episode(give=lambda value, **where: given.append((value, where)))
    running.reward(0.5, turn=1)
    assert given == [(0.5, {"call": None, "turn": 1, "leaf": None, "policy": None})]


async def hangs(_: Any) -> None:
    await asyncio.sleep(60)


async def raises(_: Any) -> None:
    raise ValueError("broken")


@pytest.mark.parametrize(
    ("workflow", "cause", "message"),
    [(hangs, "timeout", "longer than"), (raises, "workflow_error", "ValueError: broken")],
)
async def test_workflows_that_fail(workflow: Any, cause: str, message: str) -> None:
    with pytest.raises(EpisodeFailed, match=message) as caught:
        await play(workflow, episode(0.05))
    assert caught.value.cause == cause


async def test_a_workflow_at_its_deadline_tells_where_it_waited() -> None:
    with pytest.raises(EpisodeFailed, match=r"waiting at test_episode\.py:\d+ in hangs") as caught:
        await play(hangs, episode(0.05))
    errors = UserErrors()
    errors.note(caught.value.cause, caught.value.__cause__)
    (noted,) = errors.take()
    assert noted.kind == "timeout"
    assert noted.where.startswith("OutOfTime test_episode.py:")
    assert "await asyncio.sleep(60)" in noted.trace


async def test_a_deadline_that_passes_in_a_model_call_is_told_as_such() -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key") as client:

        async def asks(_: Any) -> None:
            await client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "hello"}])

        with pytest.raises(EpisodeFailed, match=r"waiting for the model's answer, waiting at test_episode\.py"):
            await play(asks, episode(0.2))


async def test_a_cancelled_episode_is_not_a_failure() -> None:
    task = asyncio.create_task(play(hangs, episode()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def slow_reward(payload: dict[str, Any], answer: Any) -> float:
    await asyncio.sleep(60)
    return 0.0


def blocked_reward(payload: dict[str, Any], answer: Any) -> float:
    time.sleep(0.5)
    return 0.0


def exits(payload: dict[str, Any], answer: Any) -> float:
    raise SystemExit(0)


@pytest.mark.parametrize(
    "reward",
    [
        slow_reward,
        blocked_reward,
        exits,
        lambda payload, answer: float("nan"),
        lambda payload, answer: float("inf"),
        lambda payload, answer: "1.0",
        lambda payload, answer: None,
        lambda payload, answer: 1 / 0,
    ],
)
async def test_rewards_that_fail_are_never_zero(reward: Any) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        await score(reward, Given({}, "answer"), 0.1, ["agent"])
    assert caught.value.cause == "reward_error"


async def test_good_rewards() -> None:
    async def later(payload: dict[str, Any], answer: Any) -> float:
        return 0.5

    async def given(reward: Any, payload: Any) -> dict[str, float]:
        return await score(reward, Given(payload, "a"), 60.0, ["agent"])

    assert await given(later, {}) == {"agent": 0.5}
    assert await given(lambda payload, answer: True, {}) == {"agent": 1.0}
    assert await given(lambda payload, answer: np.float32(0.25), {}) == {"agent": 0.25}
    assert await given(lambda payload, answer: payload["w"], {"w": 2}) == {"agent": 2.0}


async def test_without_a_reward_function_the_workflow_returns_it() -> None:
    assert await score(None, Given({}, 0.25), 1.0, ["agent"]) == {"agent": 0.25}
    assert await score(None, Given({}, {"checker": 1, "solver": 0.5}), 1.0, ["solver", "checker"]) == {
        "solver": 0.5,
        "checker": 1.0,
    }
    with pytest.raises(EpisodeFailed, match="must return the reward"):
        await score(None, Given({}, "text"), 1.0, ["agent"])


async def leaves(_: Any) -> None:
    raise SystemExit(0)


async def cancels_itself(_: Any) -> None:
    raise asyncio.CancelledError


async def has_a_tool_that_times_out(_: Any) -> None:
    raise TimeoutError("the tool took too long")


@pytest.mark.parametrize("workflow", [leaves, cancels_itself, has_a_tool_that_times_out])
async def test_what_a_workflow_does_to_itself_is_its_error(workflow: Any) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        await play(workflow, episode())
    assert caught.value.cause == "workflow_error"


async def test_a_rewards_own_timeout_and_exit_are_its_errors() -> None:
    with pytest.raises(EpisodeFailed, match="the tool took too long"):
        await score(lambda payload, answer: has_a_tool_that_times_out(0).send(None), Given({}, "a"), 60.0, [])

    async def exits_later(payload: dict[str, Any], answer: Any) -> float:
        raise SystemExit(0)

    with pytest.raises(EpisodeFailed) as caught:
        await score(exits_later, Given({}, "a"), 60.0, [])
    assert caught.value.cause == "reward_error"


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_workflow_that_swallows_its_cancellation_holds_nobody_up(
    cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rillflow.rollout.episode.GIVE_UP_SECONDS", 0.05)
    over = asyncio.Event()

    async def stubborn(_: Any) -> None:
        while not over.is_set():
            try:
                await asyncio.wait_for(over.wait(), 60)
            except BaseException:  # what users write
                continue

    task = asyncio.create_task(play(stubborn, episode(60.0 if cancelled else 0.05)))
    await asyncio.sleep(0.02)
    if cancelled:
        task.cancel()
    _, waiting = await asyncio.wait({task}, timeout=60)
    over.set()
    assert not waiting
    with pytest.raises(asyncio.CancelledError if cancelled else EpisodeFailed):
        task.result()


def test_a_workflow_keeps_numbers_with_its_episode() -> None:
    running = episode()
    running.metric("turns", 3)
    running.metric("tools/errors", np.float32(0.5))
    assert running.metrics == {"turns": 3.0, "tools/errors": 0.5}
    for name, value in (("", 1.0), ("a b", 1.0), ("x", float("nan"))):
        with pytest.raises(WorkflowError):
            running.metric(name, value)
    for number in range(MOST_METRICS - 2):
        running.metric(f"n{number}", number)
    with pytest.raises(WorkflowError, match="at most"):
        running.metric("one-more", 1)
    running.metric("turns", 4)


async def test_the_parts_of_a_reward_are_metrics() -> None:
    def parted(payload: Any, answer: Any) -> Scored:
        return Scored(0.75, {"math": 1.0, "format": 0.5})

    metrics: dict[str, float] = {}
    assert await score(parted, Given({}, ""), 5.0, ["agent"], metrics=metrics) == {"agent": 0.75}
    assert metrics == {"reward/math": 1.0, "reward/format": 0.5}
