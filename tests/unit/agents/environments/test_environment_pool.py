"""Environments in processes of their own: shared, bounded, replaced when they die, never outliving us."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rillflow.agents.environments import bases
from rillflow.agents.environments.bases import Pooled, ask_library, game_pool
from rillflow.agents.processes import close_pools
from rillflow.errors import EnvironmentLost

GAMES = Path(__file__).with_name("small_games.py")
KIND = f"{GAMES}:start"


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    close_pools()


def environment(*, workers: int = 1, games: int = 2, timeout: float = 60.0, kind: str = KIND) -> Pooled:
    return Pooled(kind, workers=workers, games=games, timeout=timeout, options={})


async def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.02)


async def test_games_of_one_process_are_apart_and_it_is_used_again() -> None:
    one, other = environment(), environment()
    first, second = await one.reset({"from": 1}, 0), await other.reset({"from": 10}, 0)
    assert first.info["pid"] == second.info["pid"]
    assert [(await one.step("2")).text, (await other.step("5")).text] == ["3", "15"]
    assert (await one.reset({"from": 7}, 0)).text == "7"
    await one.close()
    await other.close()
    third = environment()
    assert (await third.reset({}, 4)).info["pid"] == first.info["pid"]
    await third.close()


async def test_a_gold_path_is_worth_nothing_once_it_was_left() -> None:
    played = environment()
    await played.reset({}, 0)
    await played.step("1")
    assert await played.plan() == ["2"]
    await played.step("9")
    assert await played.plan() == []
    await played.close()


@pytest.mark.parametrize("action", ["die", "lie"])
async def test_a_broken_process_fails_its_episode_and_the_next_has_another(action: str) -> None:
    played = environment()
    before = await played.reset({}, 0)
    with pytest.raises(EnvironmentLost):
        await played.step(action)
    await played.close()
    after = await environment().reset({}, 3)
    assert after.text == "3"
    if action == "die":
        assert after.info["pid"] != before.info["pid"]


async def test_what_a_library_raises_is_lost_and_what_it_prints_is_not_in_the_way() -> None:
    played = environment()
    await played.reset({}, 0)
    assert (await played.step("print")).text == "0"
    with pytest.raises(EnvironmentLost, match="no such luck"):
        await played.step("raise")
    assert (await played.reset({}, 5)).text == "5"
    await played.close()


async def test_a_call_past_its_deadline_kills_the_process() -> None:
    played = environment()
    pid = (await played.reset({}, 0)).info["pid"]
    played._timeout = 1.0  # which is not for the start of the process
    with pytest.raises(EnvironmentLost, match="within 1 s"):
        await played.step("hang")
    await until(lambda: not psutil.pid_exists(pid))
    await played.close()


async def test_an_episode_that_goes_away_in_a_call_ends_the_process() -> None:
    played = environment()
    pid = (await played.reset({}, 0)).info["pid"]
    task = asyncio.create_task(played.step("hang"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await played.close()
    await until(lambda: not psutil.pid_exists(pid))


async def test_episodes_wait_for_a_game_in_their_order() -> None:
    first = environment(games=1)
    await first.reset({}, 0)
    order: list[int] = []

    async def wait(number: int) -> None:
        played = environment(games=1)
        await played.reset({}, number)
        order.append(number)
        await played.close()

    waiting = [asyncio.create_task(wait(number)) for number in range(3)]
    await asyncio.sleep(0.05)
    assert not order
    await first.close()
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2]


async def test_who_waits_too_long_or_gives_up_leaves_no_gap() -> None:
    pool = game_pool(KIND, workers=1, games=1)
    seat = await pool.take(60)
    with pytest.raises(TimeoutError, match="no free seat"):
        await pool.take(0.01)
    task = asyncio.create_task(pool.take(60))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    seat.give_back()
    again = await pool.take(60)
    again.give_back()
    pool.close()


async def test_a_process_that_nobody_plays_in_is_ended() -> None:
    pool = game_pool(KIND, workers=1, games=1, idle=0.05)
    seat = await pool.take(60)
    await seat.call({"do": "reset", "payload": {}, "seed": 0, "options": {}}, 60)
    pid = seat.worker.pid
    seat.give_back()
    await until(lambda: not pool.workers)
    await until(lambda: not psutil.pid_exists(pid))
    pool.close()


async def test_an_episode_that_gets_no_game_says_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "WAIT_SECONDS", 0.01)
    first = environment(games=1)
    await first.reset({}, 0)
    with pytest.raises(EnvironmentLost, match="1 processes play 1 games each") as error:
        await environment(games=1).reset({}, 0)
    assert "`workers` or `games`" in error.value.hint
    await first.close()


def test_a_library_can_be_asked_outside_an_episode() -> None:
    assert ask_library(KIND, "tasks", {"of": "all"}, 60) == {"what": "tasks", "of": "all"}


async def test_a_process_that_cannot_start_says_why() -> None:
    with pytest.raises(EnvironmentLost, match="not today"):
        await environment(kind=f"{GAMES}:refuse").reset({}, 0)


def test_processes_do_not_outlive_who_started_them() -> None:
    code = (
        "import asyncio, os\nfrom rillflow.agents.environments.bases import Pooled\n"
        f"e = Pooled({KIND!r}, workers=1, games=1, timeout=60, options={{}})\n"
        "print(asyncio.run(e.reset({}, 0)).info['pid'], flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    pid = int(done.stdout)
    end = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert os.getpid() != pid
