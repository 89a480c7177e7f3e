"""Plain code beside an event loop: every exception is reported."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rillflow.wire import blocking, in_daemon


async def test_an_end_of_iteration_reaches_the_caller() -> None:
    """A future does not take it: the caller would wait until its deadline."""
    with pytest.raises(RuntimeError, match="StopIteration: over") as raised:
        await asyncio.wait_for(in_daemon(_over, "plain", exited=lambda _: ValueError()), 30)
    assert isinstance(raised.value.__cause__, StopIteration)


def _over() -> None:
    raise StopIteration("over")


async def test_threads_that_have_ended_their_work_are_used_again() -> None:
    async def thread_of(work: int) -> int:
        def named() -> int:
            assert threading.current_thread().name == f"work {work}"
            return threading.get_ident()

        return await in_daemon(named, f"work {work}", exited=lambda _: ValueError())

    await thread_of(0)
    while not blocking._idle:  # noqa: ASYNC110 - a thread says that its work has ended before it waits for more
        await asyncio.sleep(0.001)
    there = {thread.ident for thread in threading.enumerate()}  # those of other tests wait for work, too
    assert await thread_of(1) in there


async def test_work_that_hangs_holds_up_no_other() -> None:
    over = threading.Event()
    hung = [asyncio.create_task(in_daemon(over.wait, "hangs", exited=lambda _: ValueError())) for _ in range(40)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(in_daemon(lambda: 5, "quick", exited=lambda _: ValueError()), 60) == 5
    over.set()
    assert all(await asyncio.gather(*hung))
    ends = [in_daemon(lambda: 1, "more", exited=lambda _: ValueError()) for _ in range(100)]
    assert sum(await asyncio.wait_for(asyncio.gather(*ends), 60)) == 100
