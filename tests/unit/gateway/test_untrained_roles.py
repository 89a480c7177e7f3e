"""The parts of a trajectory that go to trainers."""

from __future__ import annotations

import json

from openai_support import asking

from rillflow.rollout.push import pack


async def test_what_untrained_roles_said_is_in_the_transcript_alone() -> None:
    async with asking() as agent:
        agent.script("a plan", "fine", "another")
        await agent.chat({"role": "user", "content": "plan"}, extra_headers={"x-rillflow-agent": "planner"})
        await agent.chat({"role": "user", "content": "judge"}, extra_headers={"x-rillflow-agent": "verifier"})
        await agent.chat({"role": "user", "content": "again"}, extra_headers={"x-rillflow-agent": "planner"})
        record = agent.served.gateway.sessions.get("s1").record()
    samples, payloads = pack(record, ["policy"], {"verifier"})
    assert [sample.agent for sample in samples] == ["planner", "planner"]
    assert len(payloads) == 2
    assert "fine" in json.dumps(json.loads(bytes(payloads[0]["transcript"])))
    assert len(pack(record, ["policy"])[0]) == 3
