"""An MCP server on stdio around a world of its own: run by the test as a process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from maintainer_world import World, info

from rillflow.config.runs import ScalingConfig
from rillflow.resources.mcp import serve_stdio

if __name__ == "__main__":
    world = World(Path(sys.argv[1]), ScalingConfig(least=1, most=3, cooldown=60.0))
    world.infos = {"rollout-0": info("rollout-0")}
    world.own_workers = ["rollout-0"]
    world.report(10, 0.5)
    asyncio.run(serve_stdio(world.maintainer(follow=False)))
