"""Sessions survive their process: everything that agents saw is restored, wherever the log was cut."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_support import chunk
from hypothesis import given, settings
from hypothesis import strategies as st
from sessionlog_support import Player, answers, view

from rillflow.config import GatewayConfig
from rillflow.errors import DiskFull
from rillflow.gateway import Sessions
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.sessions.session_log import FileSessionLog
from rillflow.gateway.shapes import CallRefused
from rillflow.storage import SegmentWriter
from rillflow.storage.segments import segment_path
from soak import repetitions

# The length of the log, the sessions, their answers, and the session of the last step.
Moment = tuple[int, dict[str, dict[str, Any]], dict[str, dict[str, tuple[int, ...]]], str]


def held(folder: Path) -> bytes:
    return segment_path(folder, 0).read_bytes().rstrip(b"\0")


async def restored(data: bytes, secret: str = "secret") -> dict[str, Session]:
    """The sessions of a log that has one file with these bytes."""
    with tempfile.TemporaryDirectory() as name:
        segment_path(Path(name), 0).write_bytes(data)
        log = FileSessionLog(Path(name), limit=1 << 16)
        try:
            return {session.id: session for session in Sessions(secret, log=log).restore()}
        finally:
            await log.close()


def moment(player: Player, folder: Path, alive: list[str], touched: str) -> Moment:
    sessions = [player.sessions.get(name) for name in alive]
    return (
        len(held(folder)),
        {session.id: view(session) for session in sessions},
        {session.id: answers(session) for session in sessions},
        touched,
    )


async def play(folder: Path, seed: int, steps: int) -> list[Moment]:
    """Return the state after each acknowledged step."""
    player = Player(folder, seed)
    alive = [player.open() for _ in range(3)]
    moments: list[Moment] = []
    for _ in range(steps):
        touched = await player.step(alive)
        await player.log.synced()
        alive = [name for name in alive if name in player.sessions._open]
        moments.append(moment(player, folder, alive, touched))
        if not alive:
            break
    await player.log.close()
    return moments


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 30))
@pytest.mark.soak
@settings(deadline=None, max_examples=repetitions(12, 30))
def test_restored_sessions_are_those_that_lived(seed: int, steps: int) -> None:
    async def check() -> None:
        with tempfile.TemporaryDirectory() as name:
            moments = await play(Path(name), seed, steps)
            data = held(Path(name))
        for end, expected, _, _ in moments:
            found = await restored(data[:end])
            assert {id: view(session) for id, session in found.items()} == expected
            assert not any(session.incomplete for session in found.values())

    asyncio.run(check())


@given(seed=st.integers(0, 2**32), data=st.data())
@pytest.mark.soak
@settings(deadline=None, max_examples=repetitions(12, 30))
def test_cut_at_any_byte_every_acknowledged_answer_is_there(seed: int, data: st.DataObject) -> None:
    async def check() -> None:
        with tempfile.TemporaryDirectory() as name:
            moments = await play(Path(name), seed, 10)
            whole = held(Path(name))
        for _ in range(4):
            cut = data.draw(st.integers(moments[0][0], len(whole)))
            before = max((known for known in moments if known[0] <= cut), key=lambda known: known[0])
            after = min((known for known in moments if known[0] >= cut), key=lambda known: known[0])
            found = await restored(whole[:cut])
            for id, told in before[2].items():
                if id in after[2]:  # what the step that was cut took back may be gone
                    kept = answers(found[id])
                    assert {call: kept[call] for call in told if call in after[2][id]}.items() <= told.items()
            for id in before[1].keys() - {after[3]}:
                assert view(found[id]) == before[1][id]

    asyncio.run(check())


async def test_a_record_is_the_same_from_the_log(tmp_path: Path) -> None:
    player = Player(tmp_path, 5)
    name = player.open()
    for _ in range(25):
        await player.call(player.sessions.get(name))
    live = player.sessions.get(name).record()
    again = (await restored(held(tmp_path)))[name].record()
    assert again.trainable
    assert again.transcript() == live.transcript()
    for policy in ("one", "two"):
        pairs = list(zip(live.samples(policy), again.samples(policy), strict=True))
        assert pairs
        for mine, theirs in pairs:
            assert (mine.fork, mine.seams, mine.truncated) == (theirs.fork, theirs.seams, theirs.truncated)
            for column in mine.columns:
                np.testing.assert_array_equal(mine.columns[column], theirs.columns[column])
    await player.log.close()


async def hang(player: Player, name: str, *, live: bool) -> asyncio.Task[None]:
    """A call whose engine says some tokens and then nothing more."""
    player.outcome = "hang"
    player.engine.choose = lambda request: [chunk([7, 8, 9]), None]
    answer = player.begin(player.sessions.get(name), live=live, choices=1)
    task = asyncio.create_task(answer.whole())
    await player.engine.waiting.wait()
    return task


async def test_calls_that_nobody_saw_leave_no_trace_and_are_drawn_again(tmp_path: Path) -> None:
    player = Player(tmp_path, 1)
    name = player.open()
    await player.call(player.sessions.get(name))
    before = view(player.sessions.get(name))
    task = await hang(player, name, live=False)
    lost = player.engine.requests[-1]
    await player.log.synced()
    data = held(tmp_path)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await player.log.close()
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    segment_path(tmp_path, 0).write_bytes(data)
    second = Player(tmp_path, 2)
    session = second.restored[0]
    assert view(session) == before
    assert not session.incomplete
    second.histories[name] = [[]]
    changes = {"history": player.last.history, "policy": player.last.policy, "tools": player.last.tools}
    answer = second.begin(session, **changes, tools_key=player.last.tools_key, choices=1, live=False)
    assert answer.choices[0].request.sampling.seed == lost.sampling.seed
    assert answer.choices[0].request.tokens == lost.tokens
    await second.log.close()


async def test_a_stream_that_died_with_the_process_makes_the_session_incomplete(tmp_path: Path) -> None:
    player = Player(tmp_path, 1)
    streamed, other = player.open(), player.open()
    await player.call(player.sessions.get(other))
    task = await hang(player, streamed, live=True)
    await player.log.synced()  # as `shown` waits for it before the agent sees anything
    found = await restored(held(tmp_path))
    assert "streamed" in found[streamed].incomplete
    assert not found[streamed].record().trainable
    assert not found[other].incomplete
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await player.log.synced()
    assert not (await restored(held(tmp_path)))[streamed].incomplete, "its agent went before the gateway did"
    await player.log.close()


async def test_one_damaged_answer_marks_its_session_alone(tmp_path: Path) -> None:
    player = Player(tmp_path, 3)
    names = [player.open(), player.open()]
    await player.log.synced()
    ends = []
    for _ in range(6):
        for name in names:
            await player.call(player.sessions.get(name))
        ends.append(len(held(tmp_path)))
    data = bytearray(held(tmp_path))
    data[ends[2] - 3] ^= 1  # in the payload of the last frame of the second session
    found = await restored(bytes(data))
    assert "damaged" in found[names[1]].incomplete
    assert not found[names[0]].incomplete
    assert view(found[names[0]]) == view(player.sessions.get(names[0]))
    await player.log.close()


async def test_a_full_disk_fails_the_call_and_the_next_one_brings_all_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = Player(tmp_path, 4)
    name = player.open()
    session = player.sessions.get(name)
    plain = SegmentWriter.write_together

    def full(*_: object) -> int:
        raise DiskFull("full")

    monkeypatch.setattr(SegmentWriter, "write_together", full)
    player.outcome = "answer"
    with pytest.raises(DiskFull):
        await player.begin(session, choices=1, live=False).whole()
    monkeypatch.setattr(SegmentWriter, "write_together", plain)
    seeds = [player.engine.requests[-1].sampling.seed]
    changes = {"history": player.last.history, "policy": player.last.policy, "tools": player.last.tools}
    await player.begin(session, **changes, tools_key=player.last.tools_key, choices=1, live=False).whole()
    assert seeds == [player.engine.requests[-1].sampling.seed]
    assert view((await restored(held(tmp_path)))[name]) == view(session)
    await player.log.close()


class FakeClock:
    """Wall and monotonic time that a test moves; the two begin anywhere."""

    def __init__(self, wall: float, monotonic: float) -> None:
        self.wall, self.mono = wall, monotonic

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.mono


async def test_deadlines_go_on_and_what_nobody_waits_for_goes(tmp_path: Path) -> None:
    log = FileSessionLog(tmp_path, limit=1 << 16)
    sessions = Sessions("secret", clock=FakeClock(1000.0, 5.0), log=log)
    sessions.restore()
    key = sessions.open("long", seed=1, group="g", deadline_seconds=100, detail={"lease": "a"})
    sessions.open("short", seed=1, group="g", deadline_seconds=10, linger=5)
    await log.close()
    log = FileSessionLog(tmp_path, limit=1 << 16)
    again = Sessions("secret", clock=FakeClock(1030.0, 700.0), log=log)
    (session,) = again.restore()
    assert (session.id, session.deadline, session.detail) == ("long", 770.0, {"lease": "a"})
    assert again.of_key(key) is session
    assert key not in str(next(tmp_path.rglob("*.seg")).read_bytes())
    await log.close()
    log = FileSessionLog(tmp_path, limit=1 << 16)
    assert [session.id for session in log.restore()] == ["long"], "the short one was dropped for good"
    await log.close()


def test_sessions_that_nobody_closes_are_swept() -> None:
    clock = FakeClock(0.0, 0.0)
    sessions = Sessions("secret", GatewayConfig(sessions=2), clock=clock)
    sessions.open("a", seed=1, group="g", deadline_seconds=10, linger=5)
    sessions.open("b", seed=1, group="g", deadline_seconds=100)
    clock.mono = 15.0
    sessions.open("c", seed=1, group="g", deadline_seconds=10)
    with pytest.raises(CallRefused, match="not open"):
        sessions.get("a")
    assert sessions.get("b").id == "b"


async def test_a_record_is_kept_until_it_is_safe(tmp_path: Path) -> None:
    log = FileSessionLog(tmp_path, limit=1 << 16)
    sessions = Sessions("secret", log=log)
    sessions.restore()
    for name in "ab":
        sessions.open(name, seed=1, group="g", deadline_seconds=100)
    sessions.end("a")
    with pytest.raises(CallRefused, match="not open"):
        sessions.get("a").admit(GatewayConfig(), 0.0)
    await sessions.get("a").reward(0.5)
    sessions.close("a", keep=True)
    sessions.close("b")
    await log.synced()
    found = await restored(held(tmp_path))
    assert list(found) == ["a"]
    assert found["a"].closed
    assert [gift.value for gift in found["a"].rewards.state()] == [0.5]
    sessions.forget("a")
    await log.synced()
    assert await restored(held(tmp_path)) == {}
    await log.close()


async def test_a_session_that_holds_too_much_takes_no_more_calls(tmp_path: Path) -> None:
    player = Player(tmp_path, 8)
    session = player.sessions.get(player.open())
    limits = GatewayConfig(session_bytes=2000)
    while session.held < 2000:
        await player.call(session)
    with pytest.raises(CallRefused, match="2000 bytes"):
        session.admit(limits, 0.0)
    found = (await restored(held(tmp_path)))[session.id]
    assert 0 < found.held <= session.held
    await player.log.close()
