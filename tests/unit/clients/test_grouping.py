"""Group commit: everybody gets their own rows or their own error, and too much at once is refused."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rillflow.clients.units import GroupedPuts, LocalWriter
from rillflow.errors import DiskFull, StorageError, Unavailable
from rillflow.types import Row


class Slow:
    """A disk that writes when it is allowed to."""

    def __init__(self):
        self.go = threading.Event()
        self.groups = []
        self.error = None

    def put(self, rows):
        assert self.go.wait(30)
        self.groups.append(len(rows))
        if self.error:
            raise self.error
        return [Row(unit="u", segment=0, offset=len(row["mask"]), length=0) for row in rows]


async def started(puts, sizes):
    tasks = [asyncio.create_task(puts.put([{"mask": bytes(size)}] * 2)) for size in sizes]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_those_who_wait_share_one_put():
    slow = Slow()
    puts = GroupedPuts(slow.put)
    tasks = await started(puts, range(10))
    assert puts.bytes == 2 * sum(range(10))
    slow.go.set()
    for size, task in enumerate(tasks):
        assert [row.offset for row in await task] == [size, size]
    assert len(slow.groups) < 10
    assert puts.bytes == 0
    await puts.close()


@pytest.mark.parametrize(
    ("error", "kind"), [(DiskFull("full", "free some"), DiskFull), (ValueError("bug"), StorageError)]
)
async def test_a_failed_group_fails_everybody_in_it_and_nobody_after(error, kind):
    slow = Slow()
    slow.error = error
    puts = GroupedPuts(slow.put)
    tasks = await started(puts, range(5))
    slow.go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(type(one) is kind for one in found)
    assert len({id(one) for one in found}) == 5
    slow.error = None
    assert len(await puts.put([{"mask": b"1"}])) == 1
    await puts.close()


async def test_too_much_at_once_is_refused_and_one_large_put_is_not():
    slow = Slow()
    puts = GroupedPuts(slow.put, limit=1000)
    (large,) = await started(puts, [5000])
    with pytest.raises(Unavailable, match="wait to be written"):
        await puts.put([{"mask": bytes(1)}])
    slow.go.set()
    assert len(await large) == 2
    await puts.close()


async def test_who_stops_waiting_disturbs_nobody():
    slow = Slow()
    puts = GroupedPuts(slow.put)
    one, two, three = await started(puts, [1, 2, 3])
    two.cancel()
    slow.go.set()
    assert [row.offset for row in await one + await three] == [1, 1, 3, 3]
    await puts.close()


async def test_closing_writes_what_waits_and_refuses_the_rest():
    slow = Slow()
    puts = GroupedPuts(slow.put)
    tasks = await started(puts, [1, 2, 3])
    slow.go.set()
    await puts.close()
    assert [len(await task) for task in tasks] == [2, 2, 2]
    with pytest.raises(Unavailable, match="closed"):
        await puts.put([{"mask": b"1"}])


async def test_a_close_that_is_given_up_takes_no_put_with_it():
    go = threading.Event()

    def slow(rows):
        go.wait(60)
        return [Row(unit="u", segment=0, offset=n, length=1) for n, _ in enumerate(rows)]

    puts = GroupedPuts(slow)
    putting = asyncio.create_task(puts.put([{"tokens": b"1234"}]))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(puts.close(), 0.05)
    go.set()
    assert len(await asyncio.wait_for(putting, 60)) == 1
    await puts.close()


class Places:
    """Says in which thread each put was made."""

    def __init__(self):
        self.beside = []
        self.seconds = 0.0

    def put(self, rows):
        self.beside.append(threading.current_thread() is not threading.main_thread())
        time.sleep(self.seconds)
        return list(rows)


async def test_a_brief_put_needs_no_thread_until_one_was_slow():
    places = Places()
    puts = GroupedPuts(places.put, brief=lambda size: size <= 100)
    await puts.put_checked([{}], 100)
    await puts.put_checked([{}], 101)
    assert places.beside == [False, True]
    places.seconds = 0.01
    puts._quick = True  # whatever this machine did meanwhile
    await puts.put_checked([{}], 1)
    await puts.put_checked([{}], 1)
    assert places.beside[2:] == [False, True]
    await puts.close()


async def test_only_an_unsynced_write_into_an_open_file_is_brief(tmp_path):
    (tmp_path / "unit").write_text("u")
    for durability, brief in (("process", True), ("machine", False)):
        writer = LocalWriter(tmp_path, segment_bytes=1 << 16, durability=durability)
        assert not writer.brief(1)
        writer.put([{"mask": bytes(1 << 10)}])
        assert writer.brief(1 << 10) is brief
        assert not writer.brief(1 << 16)
        writer.close()
