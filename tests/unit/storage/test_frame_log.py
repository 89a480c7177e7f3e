"""The frame log: synced frames survive any end, damaged ones are reported, and torn ones are ignored."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import DiskFull, RunError, Unavailable
from rillflow.storage import SegmentWriter
from rillflow.storage.frame_log import END, Damage, Frame, FrameLog, columns_of, read_frames
from rillflow.storage.records import Unreadable, seal
from rillflow.storage.segments import segment_numbers, segment_path
from soak import repetitions


def frames_of(folder: Path) -> list[Frame | Damage]:
    log = FrameLog(folder)
    try:
        return list(log.replay())
    finally:
        asyncio.run(log.close())


async def fill(folder: Path, frames: list[Frame], **options: int) -> None:
    log = FrameLog(folder, **options)
    list(log.replay())
    for frame in frames:
        log.add(*frame)
        await log.sync()
    await log.close()


def some_frames(count: int, owners: int = 3) -> list[Frame]:
    return [Frame(number % owners, 1 + number % 4, bytes([number % 7]) * (number * 13 % 90)) for number in range(count)]


async def test_what_was_added_is_read_in_order_also_over_several_files(tmp_path: Path) -> None:
    frames = some_frames(60)
    await fill(tmp_path, frames[:40], limit=900)
    await fill(tmp_path, frames[40:], limit=900)
    assert len(file_numbers(tmp_path)) > 3
    assert await asyncio.to_thread(frames_of, tmp_path) == frames


async def test_calls_that_come_during_a_write_share_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FrameLog(tmp_path)
    writes: list[int] = []
    plain = SegmentWriter.write_together

    def counted(writer: SegmentWriter, rows: Any) -> int:
        writes.append(len(rows))
        return plain(writer, rows)

    monkeypatch.setattr(SegmentWriter, "write_together", counted)

    async def one(owner: int) -> None:
        log.add(owner, 1, b"x")
        await log.sync()

    await asyncio.gather(*(one(owner) for owner in range(50)))
    assert writes == [50]
    await log.sync()
    await log.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    with pytest.raises(RunError, match="another process"):
        FrameLog(tmp_path)
    asyncio.run(log.close())
    asyncio.run(FrameLog(tmp_path).close())


def file_numbers(folder: Path) -> list[int]:
    return sorted(segment_numbers(folder))


def frame_bytes(segment: int, offset: int, frame: Frame) -> bytes:
    """A frame as it lies at this place."""
    record = seal(columns_of(frame))
    return record.start(segment, offset) + b"".join(bytes(part) for part in record.buffers)


def laid_out(frames: list[Frame]) -> tuple[bytes, list[int]]:
    """The bytes of file 0 and where each frame ends."""
    data, ends = b"", []
    for frame in frames:
        data += frame_bytes(0, len(data), frame)
        ends.append(len(data))
    return data, ends


@given(st.integers(1, 12), st.data(), st.sampled_from([0, 1, 300]))
@settings(deadline=None, max_examples=repetitions(60, 200))
def test_cut_anywhere_only_the_torn_frame_is_missing(count: int, data: st.DataObject, zeros: int) -> None:
    frames = some_frames(count)
    whole, ends = laid_out(frames)
    cut = data.draw(st.integers(0, len(whole)))
    kept = sum(end - 7 <= cut and not whole[cut:end].rstrip(b"\0") for end in ends)  # up to 7 bytes of padding
    assert list(read_frames(0, whole[:cut] + bytes(zeros))) == frames[:kept]


@given(st.integers(1, 12), st.data())
@settings(deadline=None, max_examples=repetitions(80, 300))
def test_a_flipped_bit_never_goes_unnoticed(count: int, data: st.DataObject) -> None:
    frames = some_frames(count)
    whole, ends = laid_out(frames)
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(whole)
    changed[at] ^= 1 << bit
    found = list(read_frames(0, bytes(changed)))
    hit = sum(end <= at for end in ends)
    assert found[:hit] == frames[:hit]
    if found == frames:
        assert not whole[at], "only padding is not covered"
        return
    damage = found[hit]
    assert isinstance(damage, Damage | Unreadable)
    if isinstance(damage, Damage):
        assert damage.owner == frames[hit].owner
    if isinstance(damage, Damage) or not damage.rest:
        assert found[hit + 1 :] == frames[hit + 1 :]


def test_frames_of_another_place_are_not_believed() -> None:
    one = frame_bytes(0, 0, Frame(1, 1, b"a"))
    (elsewhere,) = read_frames(1, one)
    first, second = read_frames(0, one + one)
    assert (isinstance(elsewhere, Unreadable), first, isinstance(second, Unreadable)) == (True, Frame(1, 1, b"a"), True)


async def test_a_damaged_header_concerns_all_who_are_alive(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    for owner in (0, 1, 2):
        log.add(owner, 1, b"opened")
    log.end(1)
    log.add(0, 2, b"more")
    await log.sync()
    await log.close()
    path = segment_path(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[len(data) - len(frame_bytes(0, 0, Frame(0, 2, b"more"))) + 2] ^= 4
    path.write_bytes(data)
    found = await asyncio.to_thread(frames_of, tmp_path)
    assert [frame.owner for frame in found if isinstance(frame, Damage)] == [0, 2]
    assert len(found) == 6


async def test_a_full_disk_acknowledges_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FrameLog(tmp_path)
    log.add(0, 1, b"kept")
    await log.sync()
    plain, lost = os.pwritev, []
    left = 40

    def full(descriptor: int, data: list[bytes], at: int) -> int:
        """The disk takes 40 bytes more."""
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "full")
        taken, left = left, 0
        return plain(descriptor, [b"".join(map(bytes, data))[:taken]], at)

    monkeypatch.setattr(os, "pwritev", full)
    log.add(0, 2, b"l" * 100, lost=lambda: lost.append("first"))
    first = log.sync()
    await asyncio.sleep(0)
    log.add(0, 3, b"behind", lost=lambda: lost.append("behind"))
    second = log.sync()
    for waiting in (first, second):
        with pytest.raises(DiskFull):
            await waiting
    assert lost == ["first", "behind"]
    monkeypatch.undo()
    log.add(0, 4, b"later")
    await log.sync()
    await log.close()
    assert await asyncio.to_thread(frames_of, tmp_path) == [Frame(0, 1, b"kept"), Frame(0, 4, b"later")]


async def test_a_file_that_cannot_be_cut_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FrameLog(tmp_path)
    log.add(0, 1, b"kept")
    await log.sync()

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "pwritev", broken)
    monkeypatch.setattr(os, "ftruncate", broken)
    log.add(0, 2, b"lost")
    with pytest.raises(Exception, match="broken"):
        await log.sync()
    monkeypatch.undo()
    log.add(0, 3, b"later")
    await log.sync()
    await log.close()
    assert file_numbers(tmp_path) == [0, 1]
    assert await asyncio.to_thread(frames_of, tmp_path) == [Frame(0, 1, b"kept"), Frame(0, 3, b"later")]


async def test_too_much_that_waits_is_refused(tmp_path: Path) -> None:
    log = FrameLog(tmp_path, pending=100)
    log.add(0, 1, bytes(90))
    with pytest.raises(Unavailable):
        log.add(0, 1, bytes(20))
    await log.sync()
    log.add(0, 1, bytes(20))
    await log.close()


async def test_files_go_once_none_of_their_owners_is_alive(tmp_path: Path) -> None:
    log = FrameLog(tmp_path, limit=150)
    for _ in range(6):
        log.add(log.owner(), 1, bytes(60))
        await log.sync()
    assert file_numbers(tmp_path) == [0, 1, 2, 3, 4, 5]
    for owner in (4, 1, 3):
        log.end(owner)
    await log.sync()
    await log.close()
    assert file_numbers(tmp_path) == [0, 2, 5, 6]
    again = FrameLog(tmp_path, limit=150)
    assert [frame.owner for frame in again.replay()] == [0, 2, 5, 4, 1, 3]
    assert again.owner() == 6
    for owner in (0, 2, 5):
        again.end(owner)
    await again.sync()
    await again.close()
    assert file_numbers(tmp_path) == [7]


async def test_an_end_stays_for_as_long_as_what_it_ends(tmp_path: Path) -> None:
    """Owner 1 shares file 0 with owner 0, which lives; its end lies in a file of its own."""
    log = FrameLog(tmp_path, limit=350)
    log.add(log.owner(), 1, bytes(20))
    log.add(log.owner(), 1, bytes(90))
    await log.sync()
    log.add(1, 2, bytes(150))
    log.end(1)
    await log.sync()
    third = log.owner()
    log.add(third, 1, bytes(150))
    await log.sync()
    log.end(third)
    await log.sync()
    await log.close()
    found = await asyncio.to_thread(frames_of, tmp_path)
    assert Frame(1, END, b"") in found
    assert file_numbers(tmp_path)[0] == 0
