"""An engine process, as `rillflow run` and a person start it: it beats, serves, and sends answers away when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from rillflow.config import load_recipe
from rillflow.engine.remote import RemoteEngine
from rillflow.errors import RunError
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.local import LocalRun
from rillflow.runtime.process import STOPPED
from rillflow.runtime.roles import engine_role
from rillflow.types import Chunk, EngineInfo, Engines, GenerateRequest, Sampling
from rillflow.types.routes import Updates
from rillflow.weights.updates import EngineRoster
from rillflow.wire import Service


class Dataflow(Service):
    """Hears the beats of engines."""

    def __init__(self, token: str) -> None:
        super().__init__("dataflow", token)
        self.roster = EngineRoster()
        self.on(Updates.engine_beat, self._beat)

    async def _beat(self, info: EngineInfo) -> Engines:
        return self.roster.hear(info)


async def first_beat(dataflow: Dataflow) -> EngineInfo:
    async with asyncio.timeout(100):
        while not (engines := dataflow.roster.engines().engines):  # noqa: ASYNC110 - it sends no event here
            await asyncio.sleep(0.05)
    return engines[0]


@pytest.mark.slow
async def test_an_engine_process_serves_and_sends_its_answers_away_when_it_is_stopped(tmp_path: Path) -> None:
    # A long answer, which the signal cannot miss. No trainer publishes here, so nothing could be proven.
    overrides = ["policies.agent.engine.context=512", "policies.agent.weights.probe=off"]
    folder = RunFolder.create(load_recipe("quickstart", overrides), tmp_path)
    policy = folder.recipe.policy
    dataflow = Dataflow(folder.token)
    folder.publish_endpoint("dataflow", await dataflow.start())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rillflow", "engine", str(folder.root), "--name", "engine-7",
        env={**os.environ, "RILLFLOW_PARENT": str(os.getpid())},
    )  # fmt: skip
    try:
        info = await first_beat(dataflow)
        assert (info.name, info.url, info.versions) == ("engine-7", folder.endpoint("engine-7"), {policy: 0})
        remote = RemoteEngine(info.name, info.url, folder.token_of("node"))
        room = info.context - 4
        asked = GenerateRequest(id="r", tokens=[5, 6, 7, 8], sampling=Sampling(max_tokens=room, seed=1))
        chunks: list[Chunk] = []
        async for chunk in remote.generate(policy, asked):
            if not chunks:
                process.send_signal(signal.SIGTERM)
            chunks.append(chunk)
        assert (chunks[-1].finish, chunks[-1].seam) == ("abort", "moved")
        assert 0 < sum(len(chunk.tokens) for chunk in chunks) < room
        assert await asyncio.wait_for(process.wait(), 60) == STOPPED
        await remote.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await dataflow.stop()


@pytest.mark.parametrize("name", ["", "../engine", "a b"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="not a name"):
        engine_role(RunFolder.create(load_recipe("quickstart"), tmp_path), name)


async def test_a_run_starts_its_engines_before_its_nodes_and_keeps_them_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LocalRun(RunFolder.create(load_recipe("quickstart", ["rollout.engines=2"]), tmp_path), lambda status: None)
    started: list[str] = []
    kept: set[str] = set()

    async def nothing(*given: Any) -> Any: ...

    async def finish(seconds: float, keep: set[str]) -> None:
        kept.update(keep)

    monkeypatch.setattr(run, "_start_dataflow", nothing)
    monkeypatch.setattr(run, "_follow", nothing)
    monkeypatch.setattr(run, "_say_goodbye", nothing)
    monkeypatch.setattr(run, "_launch", lambda process: started.append(process.name))
    monkeypatch.setattr(run.supervisor, "finish", finish)
    await run._run()
    assert started.index("unit-0") < started.index("engine-0") < started.index("engine-1") < started.index("rollout-0")
    assert kept == {"dashboard", "dataflow", "unit-0", "engine-0", "engine-1"}
