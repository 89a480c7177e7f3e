"""Across real namespaces and slow links: far pools get every head they can, by deltas, and relays spare the link."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.cross_region import Size, follow, region_pull
from bench.cross_region_parts import make_model
from bench.far_links import Links, Region
from commands import Warm
from forked_command import NAMESPACE, PYTHON, Program, fork_command
from soak import SOAK, repetitions

pytestmark = [pytest.mark.needs("namespaces"), pytest.mark.slow, pytest.mark.soak]

SIZE = Size(128, 2, 4, 2.0, (Region("east", 20, 0.3), Region("west", 10, 0.3)), think=1.0)


@pytest.fixture
def root(tmp_path: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch) -> Path:
    class ForkedLinks(Links):
        """Links between processes that are forked from one that has imported torch."""

        def start(self, space: str, command: Sequence[str], log: Path) -> Program:
            environment = {**os.environ, NAMESPACE: self._space(space)}
            process = fork_command(warm.path(), [PYTHON, *command[1:]], environment, log)
            if process is None:
                return super().start(space, command, log)
            self._processes.append(process)
            return process

    monkeypatch.setattr("bench.cross_region.Links", ForkedLinks)
    make_model(tmp_path / "model", SIZE.width, SIZE.layers)
    return tmp_path


def test_far_pools_follow_by_deltas_and_relays_spare_the_link(root: Path) -> None:
    found = follow(SIZE, root, deltas=True, pools=True)
    whole = found["trainer"]["full_bytes"]
    for name in ("local", "east", "west"):
        transfers = found[name]["transfers"]
        assert transfers[-1]["version"] == SIZE.steps, name
        assert {one["kind"] for one in transfers} == {"delta"}, name  # it had version 0: the model's own weights
        assert sum(one["bytes"] for one in transfers) < whole / 2, name
        # The engine stops only while it writes; it does not wait for the link.
        assert all(one["pause"] <= one["apply"] for one in transfers), name
    used = {}
    for kind in repetitions(("relay",), ("direct", "relay")):
        other = root / kind
        other.mkdir()
        (other / "weights").symlink_to(root / "weights")
        used[kind] = region_pull(SIZE, other, relay=kind == "relay")["bytes"]
    assert whole < used["relay"] < 1.5 * whole
    if SOAK:
        assert used["direct"] > 1.9 * whole
