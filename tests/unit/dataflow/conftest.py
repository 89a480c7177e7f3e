from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataflow_world import World

MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    """Makes worlds; every one of them must balance at the end of its test."""
    worlds: list[World] = []

    def make(**options: object) -> World:
        folder = tmp_path / f"world{len(worlds)}"
        folder.mkdir()
        worlds.append(World(folder, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.check()
        world.close()
