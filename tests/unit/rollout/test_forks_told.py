"""Forks and tokens are metrics of every episode, and an agent that forks at every call is reported once, with why."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from rollout_support import World

from rillflow.contracts import Episode


async def renders_anew(episode: Episode) -> float:
    """An agent whose system prompt has a counter in it, as others have the time."""
    messages = [{"role": "user", "content": "hello"}]
    for turn in range(3):
        system = {"role": "system", "content": f"You have made {turn} calls."}
        said = await episode.role("agent").ask([system, *messages])
        messages += [said.message, {"role": "user", "content": "go on"}]
    return 1.0


async def goes_on(episode: Episode) -> float:
    messages = [{"role": "user", "content": "hello"}]
    for _ in range(3):
        said = await episode.role("agent").ask(messages)
        messages += [said.message, {"role": "user", "content": "go on"}]
    return 1.0


async def test_an_agent_that_forks_at_every_call_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with World(tmp_path, 2, workflow=renders_anew) as world:
            await world.dataflow.until(2)
    for done in world.dataflow.done:
        assert len(done.samples) == 3
        assert (done.metrics["forks"], done.metrics["tokens_trained"]) == (2.0, 9.0)
        assert done.metrics["tokens_forwarded"] == sum(sample.tokens for sample in done.samples)
    (note,) = [done.notes["forks"] for done in world.dataflow.done if done.notes]
    assert "the client changes the system prompt: content of messages[0] differs at character 14" in note
    assert "'2 calls.' instead of " in note
    assert f"forward {done.metrics['tokens_forwarded']:.0f} tokens to train 9;" in note
    assert caplog.text.count("begins a new path") == 1


async def test_a_conversation_has_no_forks_and_no_note(tmp_path: Path) -> None:
    async with World(tmp_path, 1, workflow=goes_on) as world:
        await world.dataflow.until(1)
    (done,) = world.dataflow.done
    assert (len(done.samples), done.metrics["forks"], done.metrics["tokens_trained"]) == (1, 0.0, 9.0)
    assert done.notes == {}
