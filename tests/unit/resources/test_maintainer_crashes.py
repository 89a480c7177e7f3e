"""A maintainer is killed at each of its writes and actions in turn; the next one goes on to the same end."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from maintainer_world import Killed, World, info

from rillflow.config.runs import ScalingConfig
from rillflow.errors import CorruptData
from rillflow.resources.maintainer.loop import Maintainer
from rillflow.resources.maintainer.pool import Book, Line

SCALING = ScalingConfig(least=1, most=4, cooldown=20.0, drain=10.0)


class Story:
    """Grow by two, lose one, shrink by one: with new maintainers for those that are killed, as a supervisor would."""

    def __init__(self, folder: Path, kill_at: int) -> None:
        folder.mkdir()
        self.world = World(folder, SCALING)
        self.world.own_workers = ["rollout-0"]
        self.world.infos = {"rollout-0": info("rollout-0")}
        self.points: list[str] = []
        self._kill_at = kill_at
        self.world.trip = self._point
        self._maintainer: Maintainer | None = None

    def _point(self, what: str) -> None:
        self.points.append(what)
        if len(self.points) - 1 == self._kill_at:
            raise Killed

    async def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / 2)):
            try:
                self._maintainer = self._maintainer or self.world.maintainer(start_timeout=10.0)
                await self.world.after(2, self._maintainer)
            except Killed:
                self._maintainer = None

    async def tell(self) -> None:
        world = self.world
        world.report(10, 0.6)  # ceil(1 / .4) = 3
        await self.pass_time(60)
        first = next(name for name in sorted(world.alive) if name.startswith("auto"))
        world.dead.add(first)
        world.infos[first] = info(first, state="gone")
        await self.pass_time(30)
        world.report(20, 0.0, entered=100, consumed=60)  # ceil(3 * .6 * 1.1) = 2
        await self.pass_time(40)


async def lines_of(story: Story) -> list[Line]:
    return story.world.maintainer().lines(1000)


async def count_points(folder: Path) -> int:
    story = Story(folder, kill_at=-1)
    await story.tell()
    return len(story.points)


async def test_killed_at_every_point_it_comes_to_the_same_end(tmp_path: Path) -> None:
    points = await count_points(tmp_path / "whole")
    assert points > 30
    for kill_at in range(points):
        story = Story(tmp_path / str(kill_at), kill_at)
        await story.tell()
        world, at = story.world, story.points[kill_at]
        assert len(world.alive) == 2, f"killed at {at}: {world.log}"
        assert set(world.running) == world.alive - {"rollout-0"}, f"killed at {at}: what was started is known or ended"
        lines = await lines_of(story)
        assert [line.number for line in lines] == list(range(len(lines))), f"killed at {at}: each line is there once"
        decisions = [line.version for line in lines if line.action in ("grow", "shrink", "hold")]
        assert decisions == [10, 20], f"killed at {at}: one decision on each report"
        names = [what for what in world.log if what.startswith("start ")]
        assert len(names) == len(set(names)), f"killed at {at}: no name is used twice"


def a_line(number: int) -> Line:
    return Line(number=number, time=0.0, action="hold", why="", size=1, wanted=1)


def test_a_torn_line_is_cut_and_written_again(tmp_path: Path) -> None:
    book = Book(tmp_path)
    for number in range(3):
        book.commit(a_line(number))
    log = tmp_path / "maintainer.jsonl"
    whole = log.read_bytes()
    for cut in itertools.chain(range(len(whole) - 40, len(whole)), [whole.rindex(b"\n", 0, len(whole) - 1) + 1]):
        log.write_bytes(whole[:cut])
        assert [line.number for line in Book(tmp_path).lines(10)] == [0, 1, 2]
        assert log.read_bytes() == whole


@pytest.mark.parametrize("text", [b"{", b'{"report": "x"}', b'{"format": 99}'])
def test_a_state_that_cannot_be_read_says_what_to_do(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "maintainer.json").write_bytes(text)
    with pytest.raises(CorruptData, match="remove it"):
        Book(tmp_path)


def test_the_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.state.rates, book.state.starved = {"auto-0": [1.0, 2.0]}, 3
    book.commit(a_line(0))
    assert msgspec.to_builtins(Book(tmp_path).state) == msgspec.to_builtins(book.state)
