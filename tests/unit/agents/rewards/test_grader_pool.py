"""Graders die, raise and hang: none of it is a grade."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rillflow.agents.processes import Pool
from rillflow.agents.rewards import answer_text
from rillflow.errors import RewardError

HANGS: dict[str, Any] = {"pattern": "(a+)+b", "text": "a" * 60}
FITS: dict[str, Any] = {"pattern": "a+", "text": "aaa"}


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """The pool that `answer_text.grade` uses, with a single process."""
    made = answer_text.new_pool(1)
    monkeypatch.setattr(answer_text, "shared_pool", lambda: made)
    yield made
    made.close()


async def test_a_grader_that_hangs_is_killed_and_the_next_one_grades(pool: Pool) -> None:
    await answer_text.prepare("pattern")
    (hung,) = pool.workers
    with pytest.raises(RewardError, match=r"longer than 0\.5 s"):
        await answer_text.grade("pattern", 0.5, **HANGS)
    assert not psutil.pid_exists(hung.pid)
    assert await answer_text.grade("pattern", 30.0, **FITS) == 1.0


async def test_a_grader_that_was_killed_is_replaced_and_asked_again(pool: Pool) -> None:
    assert await answer_text.grade("pattern", 30.0, **FITS) == 1.0
    (killed,) = pool.workers
    os.kill(killed.pid, signal.SIGKILL)
    assert await answer_text.grade("pattern", 30.0, **FITS) == 1.0
    assert [worker.pid for worker in pool.workers] != [killed.pid]


async def test_an_exception_of_a_grader_is_no_grade(pool: Pool) -> None:
    with pytest.raises(RewardError, match="unterminated subpattern"):
        await answer_text.grade("pattern", 30.0, pattern="(", text="")
    (worker,) = pool.workers
    with pytest.raises(RewardError, match="KeyError"):
        await answer_text.grade("nothing", 30.0)
    assert await answer_text.grade("pattern", 30.0, **FITS) == 1.0
    assert pool.workers == [worker], "by the same process"


async def test_numbers_of_any_size_reach_a_grader(pool: Pool) -> None:
    with pytest.raises(RewardError, match="unexpected keyword argument 'large'"):
        await answer_text.grade("pattern", 30.0, **FITS, large=1 << 80)


async def test_there_are_no_more_graders_than_the_pool_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = answer_text.new_pool(2)
    monkeypatch.setattr(answer_text, "shared_pool", lambda: pool)
    try:
        assert await asyncio.gather(*(answer_text.grade("pattern", 30.0, **FITS) for _ in range(6))) == [1.0] * 6
        assert len(pool.workers) <= 2
        left = [worker.pid for worker in pool.workers]
    finally:
        pool.close()
    assert not [pid for pid in left if psutil.pid_exists(pid)]


async def test_a_cancelled_grading_asks_no_grader(pool: Pool) -> None:
    seat = await pool.take(60)
    waiting = asyncio.create_task(answer_text.grade("pattern", 30.0, **FITS))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not pool.workers[0].known, "nothing was loaded for it"
    seat.give_back()
    (await pool.take(60)).give_back()  # and its seat is free again


def test_graders_end_with_the_process_that_asked_them() -> None:
    """Even if it is killed, and even a grader that is busy."""
    program = """
import asyncio, sys
from rillflow.agents.rewards import answer_text
pool = answer_text.new_pool(2)
answer_text.shared_pool = lambda: pool
async def main():
    await answer_text.prepare("pattern")
    hangs = asyncio.create_task(answer_text.grade("pattern", 2.0, pattern="(a+)+b", text="a" * 60))
    await asyncio.sleep(0.2)
    print(*(worker.pid for worker in pool.workers), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        left = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(left) == 2
    assert psutil.wait_procs(left, timeout=60)[1] == []
