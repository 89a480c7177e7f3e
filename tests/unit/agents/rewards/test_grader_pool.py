"""Graders die, raise and hang: none of it is a grade."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from rillflow.agents.rewards.grading import pool as grading_pool
from rillflow.agents.rewards.grading.pool import Grader, GraderPool
from rillflow.agents.rewards.grading.worker import Order
from rillflow.errors import RewardError
from rillflow.wire import blocking

HANGS = Order("pattern", 0.5, {"pattern": "(a+)+b", "text": "a" * 60})
FITS = Order("pattern", 30.0, {"pattern": "a+", "text": "aaa"})


@pytest.fixture
def pool():
    made = GraderPool(1)
    yield made
    made.close()


def graders() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "grading.worker" in " ".join(one.cmdline())]


def test_a_grader_that_hangs_is_gone_and_the_next_one_grades(pool: GraderPool) -> None:
    before = {one.pid for one in graders()}
    with pytest.raises(RewardError, match=r"longer than 0\.5 s"):
        pool.grade(HANGS)
    assert {one.pid for one in graders()} == before
    assert pool.grade(FITS) == 1.0


def test_a_grader_that_was_killed_is_replaced_and_asked_again(pool: GraderPool) -> None:
    before = {one.pid for one in graders()}
    assert pool.grade(FITS) == 1.0
    (mine,) = {one.pid for one in graders()} - before
    os.kill(mine, signal.SIGKILL)
    assert pool.grade(FITS) == 1.0
    assert mine not in {one.pid for one in graders()}


def test_what_a_grader_raises_is_no_grade(pool: GraderPool) -> None:
    with pytest.raises(RewardError, match="unterminated subpattern"):
        pool.grade(Order("pattern", 30.0, {"pattern": "(", "text": ""}))
    with pytest.raises(RewardError, match="KeyError"):
        pool.grade(Order("nothing", 30.0))
    assert pool.grade(FITS) == 1.0  # by the same process


def test_there_are_no_more_graders_than_the_pool_may_have() -> None:
    pool, before = GraderPool(2), len(graders())
    grades: list[float] = []
    threads = [threading.Thread(target=lambda: grades.append(pool.grade(FITS))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    try:
        assert grades == [1.0] * 6
        assert len(graders()) - before <= 2
    finally:
        pool.close()
    assert len(graders()) == before


async def test_a_grading_that_was_given_up_asks_no_grader(pool: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading_pool, "shared_pool", lambda: pool)
    asked: list[Order] = []
    monkeypatch.setattr(Grader, "grade", lambda self, order: asked.append(order))
    pool._free.acquire()
    blocking._idle.clear()
    grading = asyncio.create_task(grading_pool.grade("pattern", 30.0, pattern="a", text="a"))
    await asyncio.sleep(0)
    grading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await grading
    pool._free.release()
    while not blocking._idle:  # noqa: ASYNC110 - its thread has ended the work when it waits for more
        await asyncio.sleep(0.001)
    assert asked == []
    assert pool._free.acquire(timeout=60)  # and its slot is free again
    pool._free.release()


def test_graders_end_with_the_process_that_asked_them() -> None:
    """Even when it is killed, and even one that is in the middle of something."""
    program = """
import sys, threading, time
from rillflow.agents.rewards.grading.pool import GraderPool
from rillflow.agents.rewards.grading.worker import Order
pool = GraderPool(2)
pool.grade(Order("pattern", 30.0, {"pattern": "a", "text": "a"}))
hangs = Order("pattern", 2.0, {"pattern": "(a+)+b", "text": "a" * 60})
threading.Thread(target=pool.grade, args=(hangs,), daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        left = psutil.Process(process.pid).children()
        process.kill()
    assert left
    assert psutil.wait_procs(left, timeout=60)[1] == []
