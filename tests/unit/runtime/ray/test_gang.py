"""Gangs live and die together, wherever they are placed, and their logs are whole."""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from seats import FakeCluster

from rillflow.errors import RunError
from rillflow.resources.ray_cluster import own_folder
from rillflow.runtime.process import GIVE_UP
from rillflow.runtime.ray_gang import Gang, Member, Place, Room
from rillflow.runtime.supervisor import Supervisor

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def _own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("rillflow.runtime.ray_gang._NODE_NEWS", 0.2)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(tmp_path, restarts=2, threads=0)
    yield supervisor
    await supervisor.stop()


def gang(
    cluster: FakeCluster,
    tmp_path: Path,
    *scripts: str,
    room: Room | None = None,
    environment: dict[str, str] | None = None,
) -> Gang:
    def member(index: int, script: str) -> Member:
        def arguments(place: Place) -> list[str]:
            return [script, place.rendezvous]

        return Member(f"m{index}", {"CPU": 1.0}, tmp_path / f"m{index}.log", arguments)

    members = [member(index, script) for index, script in enumerate(scripts)]
    return Gang("gang", members, cluster, environment=environment or {}, restarts=2, room=room or Room(60.0))


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited for: {what}"
        await asyncio.sleep(0.02)


def text(tmp_path: Path, member: int = 0) -> str:
    path = tmp_path / f"m{member}.log"
    return path.read_text() if path.exists() else ""


async def test_a_gang_that_finishes_leaves_its_logs_and_nothing_else(tmp_path: Path, supervisor: Supervisor) -> None:
    cluster = FakeCluster("a")
    script = "import os, sys; print(os.environ['SECRET'], sys.argv[1:]); print('x' * 200_000)"
    process = gang(cluster, tmp_path, script, script, environment={"SECRET": "s3"})
    supervisor.add(process)
    assert await supervisor.wait(60)
    supervisor.check()
    assert cluster.seats == []
    lines = [text(tmp_path, member).splitlines() for member in (0, 1)]
    assert lines[0] == lines[1]  # both got the same rendezvous
    assert lines[0][0].startswith("s3 ['127.0.0.1:")
    assert len(lines[0][1]) == 200_000
    assert list(own_folder("test-run").iterdir()) == []


async def test_one_member_lost_ends_all_and_all_begin_anew(tmp_path: Path, supervisor: Supervisor) -> None:
    cluster = FakeCluster("a", room=2)
    process = gang(cluster, tmp_path, SLEEP, SLEEP)
    supervisor.add(process)
    await until(lambda: text(tmp_path).count("up") == text(tmp_path, 1).count("up") == 1, "both are up")
    first, second = cluster.seats
    second.die()
    await until(lambda: text(tmp_path).count("up") == text(tmp_path, 1).count("up") == 2, "both are up again")
    assert not first.host.running()
    assert process.starts == 2
    assert len(cluster.seats) == 2


async def test_the_log_of_a_predecessor_on_the_same_host_is_read_to_its_end(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """Output that was not read when the actor died is still read, once."""
    cluster = FakeCluster("a")
    process = gang(cluster, tmp_path, SLEEP)
    supervisor.add(process)
    await until(lambda: "up" in text(tmp_path), "it is up")
    seat = cluster.seats[0]
    seat.die()
    with open(Path(seat.host.folder()) / "log.log", "a") as log:
        log.write("last words\n")
    await until(lambda: text(tmp_path).count("up") == 2, "it is up again")
    assert text(tmp_path) == "up\nlast words\nup\n"


async def test_a_lost_node_does_not_count_and_another_one_is_waited_for(
    tmp_path: Path, supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster("a")
    process = gang(cluster, tmp_path, SLEEP)
    supervisor.add(process)
    for index in range(4):  # more often than a process may die
        await until(lambda: len(cluster.seats) == 1 and cluster.seats[0].pid, "it has a seat")
        cluster.lose(cluster.nodes[0])
        await until(lambda: cluster.waited, "it waits for room")
        cluster.waited.clear()
        cluster.nodes.append(f"b{index}")
    await until(lambda: len(cluster.seats) == 1, "it is placed again")
    supervisor.check()
    assert process.starts == 5


async def test_deaths_of_its_own_are_bounded(tmp_path: Path, supervisor: Supervisor) -> None:
    process = gang(FakeCluster("a"), tmp_path, "import sys; print('oh no'); sys.exit(7)")
    supervisor.add(process)
    assert await supervisor.wait(60)
    with pytest.raises(RunError, match=r"gang ended with code 7 for the 3\. time(.|\n)*oh no"):
        supervisor.check()


async def test_who_gives_up_is_not_started_again(tmp_path: Path, supervisor: Supervisor) -> None:
    process = gang(FakeCluster("a"), tmp_path, "pass", f"import sys; print('never'); sys.exit({GIVE_UP})")
    supervisor.add(process)
    assert await supervisor.wait(60)
    with pytest.raises(RunError, match=f"code {GIVE_UP}(.|\n)*never"):
        supervisor.check()
    assert process.starts == 1


async def test_without_room_it_says_so_and_in_the_end_fails(tmp_path: Path, supervisor: Supervisor) -> None:
    process = gang(FakeCluster("a", room=1), tmp_path, SLEEP, SLEEP, room=Room(0.2))
    supervisor.add(process)
    assert await supervisor.wait(60)
    with pytest.raises(RunError, match="the cluster has no room for gang: it wants 2 times CPU 1; nodes have: 1 nodes"):
        supervisor.check()


async def test_who_waits_for_room_is_stopped_at_once(
    tmp_path: Path, supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster()
    supervisor.add(gang(cluster, tmp_path, SLEEP))
    await until(lambda: len(cluster.waited) > 10, "it waits")
    with caplog.at_level(logging.WARNING):
        await until(lambda: "waits for room" in caplog.text, "it says so")
    async with asyncio.timeout(60):
        await supervisor.finish(4.0, keep=())
    supervisor.check()


async def test_stopped_members_have_time_for_their_last_words(tmp_path: Path, supervisor: Supervisor) -> None:
    polite = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), print('saved', flush=True), sys.exit(0)))\n"
        "print('up', flush=True); time.sleep(600)"
    )
    cluster = FakeCluster("a")
    supervisor.add(gang(cluster, tmp_path, polite, polite.replace("sleep(1)", "sleep(0)")))
    await until(lambda: "up" in text(tmp_path) and "up" in text(tmp_path, 1), "both are up")
    await supervisor.stop()
    assert "saved" in text(tmp_path)
    assert "saved" in text(tmp_path, 1)
    assert cluster.seats == []


async def test_stopping_one_waits_for_all_its_members(tmp_path: Path, supervisor: Supervisor) -> None:
    last = "lambda *_: (time.sleep(4), print('saved'), sys.exit(143))"
    slow = f"import signal, sys, time; signal.signal(signal.SIGTERM, {last})"
    cluster = FakeCluster("a")
    supervisor.add(gang(cluster, tmp_path, f"{slow}\n{SLEEP}", SLEEP))
    await until(lambda: "up" in text(tmp_path) and "up" in text(tmp_path, 1), "both are up")
    await supervisor.stop_one("gang", 20.0)
    assert "saved" in text(tmp_path)  # though the other had ended long before
    assert cluster.seats == []


async def test_what_hangs_is_killed(tmp_path: Path, supervisor: Supervisor) -> None:
    cluster = FakeCluster("a")
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEP}"
    process = gang(cluster, tmp_path, deaf)
    supervisor.add(process)
    await until(lambda: "up" in text(tmp_path), "it is up")
    supervisor.kill("gang")
    await until(lambda: text(tmp_path).count("up") == 2, "it was started again")
    process.signal(signal.SIGTERM)
    assert not await process.wait(0.3)
    await supervisor.stop()
    assert cluster.seats == []


def test_room_is_waited_for_as_long_as_others_have_some() -> None:
    now = [0.0]
    room = Room(10.0, clock=lambda: now[0])
    assert not room.is_over()
    now[0] = 9.0
    assert not room.is_over()
    room.seated(1)
    now[0] = 1000.0
    assert not room.is_over()
    room.seated(-1)
    assert not room.is_over()
    now[0] = 1011.0
    assert room.is_over()
