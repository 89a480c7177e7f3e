"""A run with agents from outside says where they connect, once for each place."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.cli.run import Doors
from rillflow.config import load_recipe
from rillflow.runtime.folder import RunFolder


@pytest.mark.parametrize("name", ["outside_agent", "quickstart"])
def test_where_agents_connect_is_said_once(tmp_path: Path, name: str) -> None:
    folder = RunFolder.create(load_recipe(name, ["rollout.nodes=2"]), tmp_path)
    said: list[str] = []
    doors = Doors(folder, said.append)
    doors.show()
    assert not said
    folder.publish_endpoint("rollout-1", "http://127.0.0.1:4001")
    for _ in range(2):
        doors.show()
    folder.publish_endpoint("rollout-1", "http://127.0.0.1:4002")
    doors.show()
    expected = [f"agents connect at http://127.0.0.1:{port} (POST /sessions, GET /feed)" for port in (4001, 4002)]
    assert [line.partition(" with ")[0] for line in said] == (expected if name == "outside_agent" else [])
