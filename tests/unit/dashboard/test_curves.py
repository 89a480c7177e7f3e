"""Curves follow a file that grows, tears and takes steps back, and stay honest when they are thinned."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

from dashboard_run import make_run, step_line, write_lines

from rillflow.dashboard.readers import Curves, thinned
from rillflow.runtime.folder import RunFolder


def curves_of(folder: RunFolder) -> Curves:
    curves = Curves(folder.metrics, "agent")
    curves.follow()
    return curves


def test_steps_are_read_as_they_are_written(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=2)
    curves = curves_of(folder)
    assert list(curves.policies["agent"].columns["reward"]) == [0.1, 0.2]
    with open(folder.metrics, "ab") as file:
        file.write(b'{"policy": "agent", "step": 3, "ver')
    curves.follow()
    assert len(curves.policies["agent"]) == 2
    with open(folder.metrics, "ab") as file:
        file.write(b'sion": 3, "time": 5, "reward": 0.7}\n')
    curves.follow()
    assert list(curves.policies["agent"].columns["reward"]) == [0.1, 0.2, 0.7]


def test_a_number_that_steps_lack_is_nan_and_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1)
    write_lines(folder, [step_line(2, kl=0.5), step_line(3)])
    steps = curves_of(folder).policies["agent"]
    assert [math.isnan(value) for value in steps.columns["kl"]] == [True, False, True]
    assert thinned(steps.step, steps.columns["kl"], 100) == [(2.0, 0.5)]
    assert steps.last("kl") == 0.5


def test_a_rollback_takes_the_steps_of_versions_that_died(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=4)
    evaluation = {"event": "evaluation", "step": 4, "version": 4, "reward": 0.9, "time": 1.0}
    write_lines(folder, [evaluation, {"event": "rollback", "policy": "agent", "version": 2}, step_line(3, reward=0.55)])
    curves = curves_of(folder)
    assert list(curves.policies["agent"].columns["reward"]) == [0.1, 0.2, 0.55]
    assert [done["version"] for done in curves.evaluations] == [0]
    assert curves.rollbacks == 1


def test_foreign_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1)
    with open(folder.metrics, "ab") as file:
        file.write(b'[1, 2]\n{"policy": "agent"}\nnot json\n' + b'{"policy": "agent", "step": 2, "version": 2}\n')
    curves = curves_of(folder)
    assert len(curves.policies["agent"]) == 2
    assert curves.torn == 2


def test_thinning_keeps_every_peak() -> None:
    x = array("d", range(100_000))
    y = array("d", [0.0] * 100_000)
    y[77_777], y[5] = 9.0, -4.0
    points = thinned(x, y, 300)
    assert len(points) <= 2 * 300 + 2
    assert (77_777.0, 9.0) in points
    assert (5.0, -4.0) in points
    assert points[0][0] == 0.0
    assert points[-1][0] == 99_999.0
    assert points == sorted(points)
