"""Records: a line counts whole or not at all, and nothing that counts is played again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.errors import DataError
from rillflow.evaluate.records import Record, RecordFile, fingerprint


def test_what_was_added_is_there_again(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.jsonl")
    told = Record("q1", 2, 7, reward=0.5, answer='forty\n"two"', vote="42", tokens=9, digest="ab", metrics={"a": 1.0})
    file.add(told)
    file.close()
    again = RecordFile(tmp_path / "r.jsonl")
    assert again.of([("q1", 2), ("q1", 3)]) == [told]
    assert again.rewarded("q1", 2)
    assert not again.rewarded("q1", 3)
    again.close()


def test_the_torn_end_of_a_killed_run_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    file = RecordFile(path)
    file.add(Record("q1", 0, 7, reward=1.0))
    file.add(Record("q2", 0, 7, reward=1.0))
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    again = RecordFile(path)
    assert again.rewarded("q1", 0)
    assert not again.rewarded("q2", 0)
    again.add(Record("q2", 0, 7, reward=1.0))
    again.close()
    assert path.read_bytes() == whole


def test_a_line_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    file = RecordFile(path)
    file.add(Record("q1", 0, 7, reward=0.0))
    file.close()
    path.write_bytes(path.read_bytes().replace(b'"reward":0.0', b'"reward":1.0'))
    with pytest.raises(DataError, match="was changed"):
        RecordFile(path)


def test_a_sample_that_failed_may_be_played_again_and_the_first_reward_counts(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.jsonl")
    file.add(Record("q", 0, 7, cause="timeout", error="too slow"))
    assert not file.rewarded("q", 0)
    file.add(Record("q", 0, 7, reward=1.0))
    file.add(Record("q", 0, 7, reward=0.0))
    file.close()
    again = RecordFile(tmp_path / "r.jsonl")
    assert [one.reward for one in again.of([("q", 0)])] == [1.0]
    again.close()


def test_the_fingerprint_is_of_what_was_sampled() -> None:
    one, two = Record("a", 0, 1, digest="x", seconds=1.0), Record("b", 0, 1, digest="y")
    assert fingerprint([one, two]) == fingerprint([two, Record("a", 0, 1, digest="x", seconds=2.0)])
    assert fingerprint([one, two]) != fingerprint([one, Record("b", 0, 1, digest="z")])
