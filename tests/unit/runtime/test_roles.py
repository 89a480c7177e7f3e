"""A role in a process of its own, as `rillflow run` and a person start it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rillflow.clients.units import UnitWriter
from rillflow.config import load_recipe
from rillflow.errors import RunError
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.process import STOPPED
from rillflow.runtime.roles import _playing_ranks, rollout_role, unit_role
from rillflow.storage.startup import read_stage
from rillflow.types import UnitBeat, UnitBeatReply, Units, routes
from rillflow.wire import Service


class Dataflow(Service):
    """Hears the beats of units."""

    def __init__(self, token: str) -> None:
        super().__init__("dataflow", token)
        self.beats: list[UnitBeat] = []
        self.on(routes.Dataflow.unit_beat, self._beat)

    async def _beat(self, beat: UnitBeat) -> UnitBeatReply:
        self.beats.append(beat)
        return UnitBeatReply(drop=[])

    async def units(self) -> Units:
        return Units(units=[self.beats[-1].info])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(load_recipe("quickstart"), tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - another process sends no event
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(folder: RunFolder) -> AsyncIterator[asyncio.subprocess.Process]:
    """A unit's process, asked to end as a supervisor does."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rillflow", "unit", str(folder.root), "--name", "unit-0",
        env={**os.environ, "RILLFLOW_PARENT": str(os.getpid())},
    )  # fmt: skip
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == STOPPED
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_unit_tells_the_dataflow_service_where_it_is_and_keeps_its_name(folder: RunFolder) -> None:
    dataflow = Dataflow(folder.token)
    folder.publish_endpoint("dataflow", await dataflow.start())
    try:
        async with running(folder):
            await until(lambda: bool(dataflow.beats))
            first = dataflow.beats[-1].info
            assert first.url == folder.endpoint("unit-0")
            await until(lambda: doing(folder, "unit-0") == "ready")
            assert Path(first.path) == folder.root / "units" / "unit-0"
            writer = UnitWriter(dataflow.units, folder.token_of("node"), allow_local=False)
            (row,) = await writer.put([{"tokens": b"\0" * 4}])
            await writer.close()
            assert row.unit == first.unit
        dataflow.beats.clear()
        async with running(folder):
            await until(lambda: bool(dataflow.beats))
            assert dataflow.beats[-1].info.unit == first.unit
    finally:
        await dataflow.stop()


async def test_a_process_says_that_it_waits_for_the_dataflow_service(folder: RunFolder) -> None:
    async with running(folder):
        await until(lambda: doing(folder, "unit-0") == "waiting for the dataflow service")


def doing(folder: RunFolder, process: str) -> str | None:
    stage = read_stage(folder.root, process)
    return stage.doing if stage is not None else None


@pytest.mark.parametrize("role", [unit_role, rollout_role])
@pytest.mark.parametrize("name", ["", "../unit", "a b", ".hidden"])
def test_names_that_are_no_file_names_are_refused(
    folder: RunFolder, role: Callable[[RunFolder, str], None], name: str
) -> None:
    with pytest.raises(RunError, match="not a name"):
        role(folder, name)


@pytest.mark.parametrize(
    ("said", "by_default", "ranks"),
    [
        (None, True, {0, 1, 2}), (None, False, set()), ("", True, set()), (" ", True, set()), ("0,2", False, {0, 2}),
        ("1", True, {1}), ("2, 0", False, {0, 2}),
    ],
)  # fmt: skip
def test_which_ranks_play(said: str | None, by_default: bool, ranks: set[int]) -> None:
    assert _playing_ranks(said, 3, by_default=by_default) == ranks


@pytest.mark.parametrize("said", ["3", "-1", "all", "0,,1", "0;1"])
def test_ranks_that_are_not_there_cannot_play(said: str) -> None:
    with pytest.raises(RunError, match="does not name ranks"):
        _playing_ranks(said, 3, by_default=True)
