"""Events that a session logs only once survive full disks, repeated restarts and odd numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gateway_support import chunk
from sessionlog_support import Player, answers, view

from rillflow.errors import DiskFull, Unavailable
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.trees.messages import ToolCall, message
from rillflow.storage import SegmentWriter


class Disk:
    """Full, or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        plain = SegmentWriter.write_together

        def write(writer: SegmentWriter, rows: Any) -> int:
            if self.full:
                raise DiskFull("full")
            return plain(writer, rows)

        monkeypatch.setattr(SegmentWriter, "write_together", write)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


async def answered(player: Player, session: Session) -> None:
    player.outcome = "answer"
    await player.begin(session, choices=1, live=False).whole()


async def after_restart(player: Player, folder: Path) -> Player:
    await player.log.close()
    return Player(folder, 99)


async def lose(player: Player) -> None:
    """Wait for what is queued to fail."""
    with pytest.raises(DiskFull):
        await player.log.synced()


async def test_numbers_of_abandoned_answers_are_not_given_again_after_a_restart(tmp_path: Path) -> None:
    first = Player(tmp_path, 1)
    name = first.open()
    first.engine.choose = lambda request: [chunk([7, 8]), chunk([9], finish="stop")]
    answer = first.begin(first.sessions.get(name), live=True, choices=1)
    stream = answer.pieces()
    await anext(stream)
    await stream.aclose()  # the agent hung up
    second = await after_restart(first, tmp_path)
    second.histories[name] = [[]]
    session = second.sessions.get(name)
    await answered(second, session)
    told = answers(session)
    assert told
    third = await after_restart(second, tmp_path)
    assert answers(third.sessions.get(name)) == told, "an agent has this answer"
    await third.log.close()


async def test_a_session_that_was_closed_on_a_full_disk_stays_closed(tmp_path: Path, disk: Disk) -> None:
    player = Player(tmp_path, 1)
    gone, there = player.open(), player.open()
    for name in (gone, there):
        await answered(player, player.sessions.get(name))
    disk.full = True
    player.sessions.close(gone)
    await lose(player)
    disk.full = False
    await answered(player, player.sessions.get(there))
    again = await after_restart(player, tmp_path)
    assert [session.id for session in again.restored] == [there]
    await again.log.close()


async def test_a_session_that_ended_on_a_full_disk_takes_no_call_after_a_restart(tmp_path: Path, disk: Disk) -> None:
    player = Player(tmp_path, 1)
    name = player.open()
    session = player.sessions.get(name)
    await answered(player, session)
    disk.full = True
    player.sessions.note(name, {"said": "done"})
    player.sessions.end(name)
    await lose(player)
    disk.full = False
    await player.log.synced()  # the agent asks again, and its end is acknowledged
    again = await after_restart(player, tmp_path)
    assert view(again.sessions.get(name)) == view(session)
    await again.log.close()


async def test_an_answer_that_was_taken_back_on_a_full_disk_stays_taken_back(tmp_path: Path, disk: Disk) -> None:
    player = Player(tmp_path, 1)
    name = player.open()
    session = player.sessions.get(name)
    player.outcome = "answer"
    answer = player.begin(session, choices=1, live=False)
    await answer.whole()
    disk.full = True
    answer.abandon()  # its agent was cut off
    await lose(player)
    disk.full = False
    changes = {"history": player.last.history, "policy": player.last.policy, "tools": player.last.tools}
    await player.begin(session, **changes, tools_key=player.last.tools_key, choices=1, live=False).whole()
    again = await after_restart(player, tmp_path)
    assert view(again.sessions.get(name)) == view(session), "the draw is there once"
    await again.log.close()


async def test_what_the_disk_had_no_room_for_is_asked_for_only_so_often(tmp_path: Path, disk: Disk) -> None:
    """A disk that stays full costs one attempt for each question, not a loop."""
    player = Player(tmp_path, 1)
    name = player.open()
    await player.log.synced()
    disk.full = True
    player.sessions.close(name)
    for _ in range(3):
        await lose(player)
    disk.full = False
    await player.log.synced()
    again = await after_restart(player, tmp_path)
    assert not again.restored
    await again.log.close()


async def test_numbers_of_any_size_are_kept(tmp_path: Path) -> None:
    player = Player(tmp_path, 1)
    name = player.open()
    session = player.sessions.get(name)
    huge = message("assistant", "", [ToolCall("t", "look", '{"x": [1, {"y": -123456789012345678901234567890}]}')])
    player.outcome = "answer"
    await player.begin(session, history=[huge, message("tool", "seen", call_id="t")], choices=1, live=False).whole()
    player.sessions.note(name, {"lease": 2**70})
    await player.log.synced()
    again = await after_restart(player, tmp_path)
    assert view(again.sessions.get(name)) == view(session)
    await again.log.close()


async def test_a_call_that_is_cut_while_too_much_waits_for_the_disk_is_still_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = Player(tmp_path, 1)
    name = player.open()
    session = player.sessions.get(name)
    player.engine.choose = lambda request: [chunk([7, 8, 9]), None]
    answer = player.begin(session, live=True, choices=1)
    task = asyncio.create_task(answer.whole())
    session.at_work[task] = answer.abandon
    await player.engine.waiting.wait()
    await player.log.synced()
    monkeypatch.setattr(player.log._log, "_pending", 0)
    player.sessions.close(name)
    await asyncio.wait([task], timeout=60)
    assert task.cancelled()
    monkeypatch.undo()
    again = await after_restart(player, tmp_path)
    assert not again.restored
    await again.log.close()


async def test_a_stream_that_cannot_be_noted_as_begun_is_the_same_draw_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = Player(tmp_path, 1)
    session = player.sessions.get(player.open())
    await player.log.synced()
    monkeypatch.setattr(player.log._log, "_pending", 0)
    answer = player.begin(session, live=True, choices=1)
    with pytest.raises(Unavailable):
        await anext(answer.pieces())  # no token may be seen before its call is logged
    assert not any(session.draws.values())
    assert not answers(session)
    monkeypatch.undo()
    await player.log.close()


async def test_no_answer_of_a_stream_ends_before_its_beginning_is_kept(tmp_path: Path, disk: Disk) -> None:
    """Otherwise a crash after it would leave a call that is not known to have been seen."""
    player = Player(tmp_path, 1)
    session = player.sessions.get(player.open())
    await player.log.synced()
    player.engine.choose = lambda request: [chunk([7]), None] if request.id.endswith("1") else [chunk([7], 1, "stop")]
    disk.full = True
    answer = player.begin(session, live=True, choices=2)
    await lose(player)
    disk.full = False
    with pytest.raises(DiskFull):
        await anext(answer.pieces())  # no token may be seen before its call is logged
    await player.log.close()
