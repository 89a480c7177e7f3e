"""Training that has paused a node takes no time from its episodes: neither the workflow's nor the gateway's ends."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from rillflow.contracts import SystemClock
from rillflow.gateway import lifetime
from rillflow.gateway.lifetime import Cutting
from rillflow.rollout.episode import EpisodeFailed, RunningEpisode, play
from rillflow.rollout.handover import NodeClock
from rillflow.types import Prompt, Task


def episode(clock: NodeClock, seconds: float) -> RunningEpisode:
    task = Task(id="t.0", prompt=Prompt(id="p", payload={}), group="t", place=0, lane="train", seed=3)
    client = openai.AsyncOpenAI(api_key="x", base_url="http://127.0.0.1:1")
    return RunningEpisode(
        task, client=client, policies=["p"], url="http://127.0.0.1:1/s/a", api_key="k", clock=clock, seconds=seconds,
        give=lambda *_, **__: None,
    )  # fmt: skip


async def test_a_workflow_may_take_as_long_as_it_is_paused() -> None:
    clock, trained = NodeClock(SystemClock()), asyncio.Event()
    clock.stop()

    async def workflow(_: Any) -> str:
        await trained.wait()
        return "done"

    playing = asyncio.create_task(play(workflow, episode(clock, 0.02)))
    await asyncio.sleep(0.1)
    assert not playing.done(), "five times its time has passed, in which it was paused"
    trained.set()
    assert await playing == "done"


async def test_it_is_late_once_its_own_time_is_over() -> None:
    clock = NodeClock(SystemClock())
    clock.stop()
    playing = asyncio.create_task(play(lambda _: asyncio.sleep(60), episode(clock, 0.02)))
    await asyncio.sleep(0.05)
    clock.go()
    with pytest.raises(EpisodeFailed, match="timeout"):
        await asyncio.wait_for(playing, 20)


class Session:
    id, closed = "s", False

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.at_work: dict[Any, Any] = {}


async def test_a_call_is_cut_when_its_session_has_no_time_left_and_not_before() -> None:
    clock = NodeClock(SystemClock())
    session: Any = Session(clock.monotonic() + 0.02)
    clock.stop()
    work = asyncio.create_task(asyncio.sleep(60))
    cutting = Cutting(work, session, None, clock)
    await asyncio.sleep(5 * lifetime._LOOK)
    assert not work.done()
    clock.go()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(work, 20)
    cause = cutting.cause()
    assert cause is not None
    assert cause.status == 504
    cutting.release()
