"""A reward function that names them gets the episode's messages, metrics and facts, as they were played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout_support import World

from rillflow.contracts import Episode


async def with_a_tool(episode: Episode) -> str:
    """Two calls of one conversation, with a tool's result between them."""
    use = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": '{"of": "pens"}'}}
    messages: list[Any] = [{"role": "user", "content": "how many?"}]
    said = await episode.role("agent").ask(messages)
    messages += [
        said.message,
        {"role": "user", "content": "count them"},
        {"role": "assistant", "tool_calls": [use]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    await episode.role("agent").ask(messages)
    episode.metric("turns", 2)
    return "7"


async def test_messages_metrics_and_facts(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(payload: Any, answer: Any, messages: Any, metrics: Any, episode: Any) -> float:
        seen.append((payload, answer, messages, metrics, episode))
        messages.clear()  # a copy: the transcript keeps its own
        return 1.0

    async with World(tmp_path, 1, workflow=with_a_tool, reward=reward) as world:
        await world.dataflow.until(1)
        (done,) = world.dataflow.done
        (columns,) = world.unit.get([done.samples[0].row], ["transcript"])
    assert b"count them" in columns["transcript"]
    ((payload, answer, _, metrics, facts),) = seen
    assert (payload, answer, metrics) == ({"question": "what is 0?"}, "7", {"turns": 2.0})
    assert (facts.task, facts.prompt, facts.policies, facts.seed, facts.evaluating) == (
        "g.0",
        "p0",
        ["agent"],
        0,
        False,
    )
    assert 0 <= facts.seconds < 60


async def test_every_message_once(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(messages: Any) -> float:
        seen.extend(messages)
        return 1.0

    async with World(tmp_path, 1, workflow=with_a_tool, reward=reward) as world:
        await world.dataflow.until(1)
    roles = ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in seen] == roles
    assert seen[3]["tool_calls"][0]["function"]["name"] == "count"
    assert seen[4]["content"] == "7"
