"""OpenEnv's own client plays an environment that our server offers."""

from __future__ import annotations

import asyncio
import json
import subprocess

import pytest
from agent_play import SCRIPTS, python_of

from rillflow.agents.environments.household import Household, prompts
from rillflow.agents.environments.openenv import OpenEnvServer

pytestmark = pytest.mark.agents


async def test_the_packages_own_client() -> None:
    (row,) = prompts("train", 1, 1, size="small")
    server = OpenEnvServer("household", Household, "secret")
    command = [str(python_of("openenv-core")), str(SCRIPTS / "openenv_client.py")]
    try:
        given = [await server.start(), json.dumps(row["payload"])]
        done = await asyncio.to_thread(
            subprocess.run, [*command, *given], capture_output=True, text=True, timeout=120, check=False
        )
    finally:
        await server.close()
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["text"]
    assert told["done"] is False
    assert told["steps"] == 1
