"""The batcher: callers that come during a call share the next one, within its bounds, and each gets its own answer."""

from __future__ import annotations

import asyncio

import pytest

from rillflow.batching import Batcher
from rillflow.errors import DiskFull, RillflowError, Unavailable


class Work:
    """Doubles numbers once it is let go; refuses negative ones."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.go = asyncio.Event()
        self.error: RillflowError | None = None

    async def __call__(self, items: list[int]) -> list[int | RillflowError]:
        self.calls.append(items)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return [2 * item if item >= 0 else Unavailable("negative") for item in items]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_items_of_one_turn_share_a_call_and_later_ones_the_next() -> None:
    work = Work()
    batcher = Batcher[int, int](work)
    first = [batcher.submit(n) for n in (1, -2, 3)]
    await turns()
    second = [batcher.submit(n) for n in (4, 5)]
    work.go.set()
    assert [await first[0], await first[2], *await asyncio.gather(*second)] == [2, 6, 8, 10]
    with pytest.raises(Unavailable, match="negative"):
        await first[1]
    assert work.calls == [[1, -2, 3], [4, 5]]


async def test_a_call_has_bounds_that_one_large_item_may_pass() -> None:
    work = Work()
    work.go.set()
    batcher = Batcher[int, int](work, most=3, most_size=10)
    await asyncio.gather(*(batcher.submit(n, size) for n, size in enumerate([4, 4, 4, 50, 1, 1, 1, 1])))
    assert work.calls == [[0, 1], [2], [3], [4, 5, 6], [7]]
    assert batcher.size == 0


async def test_what_waits_behind_a_failed_call_can_be_failed_with_it() -> None:
    work = Work()
    batcher = Batcher[int, int](work)
    first = batcher.submit(1, 5)
    await turns()
    behind = [batcher.submit(n, 5) for n in (2, 3)]
    assert batcher.fail_waiting(DiskFull("full")) == [2, 3]
    for waiting in behind:
        with pytest.raises(DiskFull):
            await waiting
    assert batcher.size == 5
    work.go.set()
    assert await first == 2
    assert work.calls == [[1]]


@pytest.mark.parametrize("finish", [True, False])
async def test_close_finishes_what_waits_or_fails_it(finish: bool) -> None:
    work = Work()
    batcher = Batcher[int, int](work)
    waiting = [batcher.submit(1)]
    await turns()
    waiting.append(batcher.submit(2))
    closing = asyncio.create_task(batcher.close(finish=finish))
    await turns()
    work.go.set()
    await closing
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert found == [2, 4] if finish else [type(one) for one in found] == [Unavailable, Unavailable]
    with pytest.raises(Unavailable, match="closed"):
        batcher.submit(3)


async def test_items_of_one_turn_begin_one_call_where_several_may_be_under_way() -> None:
    work = Work()
    batcher = Batcher[int, int](work, at_once=3, most=2)
    waiting = [batcher.submit(n) for n in range(5)]
    await turns()
    assert work.calls == [[0, 1], [2, 3], [4]]
    waiting.append(batcher.submit(5))
    await turns()
    assert len(work.calls) == 3
    closing = asyncio.create_task(batcher.close(finish=True))
    work.go.set()
    await closing
    assert await asyncio.gather(*waiting) == [0, 2, 4, 6, 8, 10]
    assert work.calls[3:] == [[5]]
