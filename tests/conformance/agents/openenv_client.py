"""The client of `openenv-core`: one episode with one step. Prints its observations."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.core.generic_client import GenericEnvClient


async def play(url: str, payload: dict[str, Any]) -> dict[str, Any]:
    async with GenericEnvClient(base_url=url) as client:
        result = await client.reset(seed=3, **payload)
        step = await client.step({"action": "look"})
        state = await client.state()
    return {"text": result.observation["text"], "done": step.done, "steps": state["step_count"]}


print(json.dumps(asyncio.run(play(sys.argv[1], json.loads(sys.argv[2])))))
