"""Shares of a worker's time, and the picture of all workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow.errors import RunError
from rillflow.observe.timeline import Window, draw, idle_share, report, seconds, shares, timeline, whole
from rillflow.storage.spans import Span

WORKERS = {
    "rollout-0": [Span("idle", 0, 2), Span("rollout", 2, 8), Span("load", 8, 9), Span("idle", 9, 14)],
    "trainer-p": [Span("idle", 0, 4), Span("train", 4, 10), Span("switch", 10, 10.5), Span("rollout", 10.5, 12)],
}


def test_shares_are_of_the_window_and_add_up() -> None:
    window = Window(2, 12)
    assert shares(WORKERS["rollout-0"], window) == {
        "train": 0.0, "switch": 0.0, "load": 0.1, "infer": 0.0, "rollout": 0.6, "idle": pytest.approx(0.3),
    }  # fmt: skip
    assert idle_share(WORKERS["trainer-p"], window) == pytest.approx(0.2)
    for spent in report(WORKERS, window).values():
        assert sum(spent.values()) == pytest.approx(1.0)


def test_a_worker_that_was_not_there_was_idle() -> None:
    assert seconds([Span("train", 5, 6)], Window(0, 10)) == {
        "train": 1.0, "switch": 0.0, "load": 0.0, "infer": 0.0, "rollout": 0.0, "idle": 9.0,
    }  # fmt: skip
    assert shares([], Window(3, 3)) == {}
    assert idle_share([], Window(3, 3)) == 0.0


def test_the_window_begins_and_ends_with_work() -> None:
    assert whole(WORKERS) == Window(2, 12)
    assert whole({"w": [Span("idle", 1, 5)]}) == Window(1, 5)


def write(run: Path) -> None:
    (run / "timeline").mkdir(parents=True)
    for worker, spans in WORKERS.items():
        lines = [json.dumps([span.state, span.begin, span.end]) for span in spans]
        (run / "timeline" / f"{worker}.jsonl").write_text("\n".join(lines))


def test_a_run_without_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no timeline"):
        timeline(tmp_path)
    write(tmp_path)
    assert list(timeline(tmp_path)) == ["rollout-0", "trainer-p"]


def test_it_is_drawn(tmp_path: Path) -> None:
    many = [Span("rollout" if at % 2 else "idle", at / 1000, (at + 1) / 1000) for at in range(20_000)]
    draw(WORKERS | {"rollout-1": many}, tmp_path / "t.png", "a run")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
