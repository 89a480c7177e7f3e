"""A worker is in one state at a time; its spans are on disk within a second, in bounded files."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.storage.spans import BOUND, STATES, Doing, Span, SpanFollower, SpanLog, open_spans, read_spans


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def quiet(folder: Path, clock: Clock, bound: int = BOUND) -> SpanLog:
    """It flushes when the test says so."""
    return SpanLog(folder / "timeline" / "w.jsonl", clock=clock, bound=bound, flush=3600.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def spans(tmp_path: Path, clock: Clock) -> Iterator[SpanLog]:
    log = quiet(tmp_path, clock)
    yield log
    log.close()


def at(clock: Clock, time: float) -> None:
    clock.time = time


def test_a_worker_is_in_the_strongest_of_its_states(spans: SpanLog, clock: Clock, tmp_path: Path) -> None:
    at(clock, 101)
    spans.begin("rollout")
    at(clock, 102)
    with spans.doing("load"):
        at(clock, 103)
    at(clock, 104)
    with spans.doing("switch"):
        spans.end("rollout")
        at(clock, 105)
    with spans.doing("train"), spans.doing("train"):
        at(clock, 106)
    at(clock, 107)
    spans.flush()
    assert read_spans(tmp_path) == {
        "w": [
            Span("idle", 100, 101),
            Span("rollout", 101, 102),
            Span("load", 102, 103),
            Span("rollout", 103, 104),
            Span("switch", 104, 105),
            Span("train", 105, 106),
            Span("idle", 106, 107),
        ]
    }


def test_a_long_state_is_written_in_parts_and_read_as_one(spans: SpanLog, clock: Clock, tmp_path: Path) -> None:
    spans.begin("train")
    for second in range(101, 105):
        at(clock, second)
        spans.flush()
    assert len((tmp_path / "timeline" / "w.jsonl").read_bytes().splitlines()) == 4
    assert read_spans(tmp_path) == {"w": [Span("train", 100, 104)]}


def test_it_flushes_by_itself_whatever_its_worker_does(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / "timeline" / "w.jsonl", flush=0.01)
    log.begin("train")
    written = threading.Event()
    for _ in range(2000):
        if any(span.state == "train" for span in read_spans(tmp_path).get("w", [])):
            break
        written.wait(0.01)
    else:
        raise AssertionError("nothing was flushed")
    log.close()


def test_files_have_a_bound(tmp_path: Path, clock: Clock) -> None:
    log = quiet(tmp_path, clock, bound=2000)
    for second in range(1000):
        at(clock, 101 + second)
        (log.begin if second % 2 == 0 else log.end)("rollout")
        log.flush()
    log.close()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "timeline").iterdir()}
    assert set(sizes) == {"w.jsonl", "w.jsonl.1"}
    assert max(sizes.values()) <= 2000
    (found,) = read_spans(tmp_path).values()
    assert found[-1].end == 1100, "the newest are there"
    assert found[0].begin > 100, "the oldest are not"


def test_the_buffer_has_a_bound(spans: SpanLog, clock: Clock, tmp_path: Path) -> None:
    for tick in range(20_000):
        at(clock, 100 + tick / 1e5)
        (spans.begin if tick % 2 == 0 else spans.end)("rollout")
    spans.flush()
    assert sum(len(found) for found in read_spans(tmp_path).values()) <= 4097


def test_a_disk_that_takes_nothing_stops_nobody(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "timeline").write_text("in the way")
    log = quiet(tmp_path, clock)
    for second in range(3):
        at(clock, 101 + second)
        log.flush()
    log.close()
    assert sum("timeline has gaps" in line for line in caplog.messages) == 1


def test_torn_lines_and_other_files_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    folder.mkdir()
    (folder / "w.jsonl").write_bytes(b'["train",1.0,2.0]\n["sleep",2.0,3.0]\n[]\nnonsense\n["idle",3.0,4.0]\n["tra')
    (folder / "notes.txt").write_text("mine")
    assert read_spans(tmp_path) == {"w": [Span("train", 1, 2), Span("idle", 3, 4)]}
    assert read_spans(tmp_path / "nowhere") == {}


def test_the_file_is_named_after_its_worker(tmp_path: Path) -> None:
    log = open_spans(tmp_path, "rollout-0")
    log.close()
    assert list(read_spans(tmp_path)) == ["rollout-0"]


@given(st.lists(st.tuples(st.sampled_from(STATES[:-1]), st.booleans(), st.integers(-1, 3)), max_size=40))
def test_spans_follow_each_other_without_gap_or_overlap(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Doing, bool, int]]
) -> None:
    clock, folder = Clock(), tmp_path_factory.mktemp("spans")
    log = quiet(folder, clock)
    begun: list[Doing] = []
    for doing, begins, seconds in steps:
        clock.time += seconds
        if begins:
            log.begin(doing)
            begun.append(doing)
        elif doing in begun:
            log.end(doing)
            begun.remove(doing)
    clock.time += 1
    log.close()
    found = read_spans(folder).get("w", [])
    assert all(one.end == two.begin for one, two in itertools.pairwise(found))
    assert all(span.begin < span.end for span in found)


def test_a_follower_gives_each_span_once_when_it_has_ended(spans: SpanLog, clock: Clock, tmp_path: Path) -> None:
    follower = SpanFollower(tmp_path)
    assert follower.new() == {}
    with spans.doing("train"):
        at(clock, 101)
        spans.flush()
        assert follower.new() == {}, "it may go on"
        at(clock, 102)
        spans.flush()
    at(clock, 103)
    spans.flush()
    path = tmp_path / "timeline" / "w.jsonl"
    with open(path, "ab") as file:
        file.write(b'["load",103')  # half a line
    assert follower.new() == {"w": [Span("train", 100.0, 102.0)]}
    with open(path, "ab") as file:
        file.write(b".0,104.0]\n")
    assert follower.new() == {"w": [Span("idle", 102.0, 103.0)]}
    path.write_text('["rollout",105.0,106.0]\n')  # a new file in place of a full one
    assert follower.new(rest=True) == {"w": [Span("load", 103.0, 104.0), Span("rollout", 105.0, 106.0)]}
    assert follower.new(rest=True) == {}
