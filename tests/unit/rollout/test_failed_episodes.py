"""A node sends the trajectories of failed episodes, bounded in number and size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollout_support import World

from rillflow.contracts import Episode, SystemClock
from rillflow.rollout import push
from rillflow.rollout.episode import EpisodeFailed
from rillflow.rollout.push import FailureSender
from rillflow.storage.trajectory_format import Trajectory, TrajectoryInfo, decode_body

UNNAMED = TrajectoryInfo(id="x", time=0.0, lane="train", status="failed", kept="failure")


class Clock(SystemClock):
    time = 0.0

    def monotonic(self) -> float:
        return self.time


async def asks_then_breaks(episode: Episode) -> float:
    await episode.role("agent").ask([{"role": "user", "content": "hello"}])
    return 1 / len(episode.payload.get("missing", ""))


async def silent(episode: Episode) -> str:
    return "said nothing to a model"


async def failed(folder: Path, workflow: Any, **options: Any) -> tuple[Trajectory, int]:
    async with World(folder, 1, workflow=workflow, **options) as world:
        await world.dataflow.until(1)
    (news,) = world.dataflow.failed
    return decode_body(UNNAMED, news.trajectory), news.calls


async def test_it_sends_messages_tokens_and_the_traceback(tmp_path: Path) -> None:
    sent, calls = await failed(tmp_path, asks_then_breaks)
    assert calls == 1
    said = sent.messages()
    assert said[0]["content"] == "hello"
    assert said[-1]["role"] == "assistant"
    (path,) = sent.samples
    assert path.mask.sum() > 0
    assert (path.versions[path.mask == 1] == 0).all()
    assert "ZeroDivisionError" in sent.error
    assert "in asks_then_breaks" in sent.error


async def test_an_episode_without_a_call_sends_why_it_failed(tmp_path: Path) -> None:
    sent, calls = await failed(tmp_path, silent, reward=lambda payload, answer: 1.0)
    assert (calls, sent.paths, sent.samples) == (0, [], [])
    assert "called no model" in sent.error


async def test_one_that_is_too_large_goes_without_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = await failed(tmp_path / "whole", asks_then_breaks)
    text = len(push.encode_body(Trajectory(UNNAMED, paths=whole.paths, error=whole.error)))
    monkeypatch.setattr(push, "MOST_SENT", text + 50)
    sent, _ = await failed(tmp_path / "cut", asks_then_breaks)
    assert (len(sent.samples), len(sent.messages())) == (0, len(whole.messages()))


def test_a_node_whose_episodes_all_fail_sends_some_at_once_and_then_one_now_and_then() -> None:
    clock = Clock()
    sender = FailureSender(clock)
    failure = EpisodeFailed("agent_error", "exit 1")
    assert sum(bool(sender.body(None, failure)) for _ in range(100)) == push.BURST
    clock.time += push.PAUSE * 1.5
    assert [bool(sender.body(None, failure)) for _ in range(2)] == [True, False]
    clock.time += 1e9
    assert sum(bool(sender.body(None, failure)) for _ in range(100)) == push.BURST
