"""The loop with batches in parts, and with its own engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_world import Crash, Ledger, NotedCheckpoints, NotedStore, Unigram, crash_at, same, start

from rillflow.clients.payloads import DamagedRows
from rillflow.config import TrainerConfig
from rillflow.errors import CorruptData, LeaseLost, RunError
from rillflow.trainer.loop import MOST_ABANDONED, TrainerLoop
from rillflow.types import BatchReply, Row


def damaged() -> DamagedRows:
    return DamagedRows([Row(unit="u", segment=0, offset=0, length=1)], CorruptData("a bit has flipped"))


def lost() -> LeaseLost:
    return LeaseLost("the batch was released")


def in_order(events: list[str]) -> list[str]:
    """Return the events of the loop itself. Versions are published by another thread, one after the other."""
    published = [event for event in events if event.startswith("publish")]
    assert published == [f"{word} {version}" for version in range(4) for word in ("publish", "published")]
    return [event for event in events if event.startswith(("join", "lease", "commit", "checkpoint"))]


def test_a_run_in_parts_is_a_run_of_whole_batches(tmp_path: Path) -> None:
    whole, split = Ledger(3), Ledger(3, parts=3)
    one, other = start(tmp_path / "whole", whole), start(tmp_path / "split", split)
    assert in_order(split.events) == in_order(whole.events)
    assert [metrics["parts"] for metrics in split.metrics] == [3, 3, 3]
    assert all(metrics["wait_seconds"] >= 0 for metrics in split.metrics)
    assert len(split.attempts) == 10
    assert len(set(split.attempts)) == 4
    theirs = other.masters()
    # Adam divides small gradients by their own size: a last digit that differs may move a weight by much of a step.
    for name, tensor in one.masters().items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("error", [damaged, lost])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_batch_that_cannot_be_finished_is_abandoned_for_another(tmp_path: Path, error: object, part: int) -> None:
    ledger = Ledger(2, parts=3, reading=[*[None] * part, error()])  # type: ignore[operator]
    trained = start(tmp_path, ledger)
    assert ledger.live == [(0, 1), (1, 2)]
    assert ledger.events.count("lease") == 4
    assert ledger.attempts[part] != ledger.attempts[part + 1]
    assert same(trained, start(tmp_path / "straight", Ledger(2, parts=3)))


def test_a_batch_known_to_be_lost_is_not_trained_to_its_end(tmp_path: Path) -> None:
    """Also just before the update: a version of a batch that is gone would only die."""
    for checks in range(4):
        ledger = Ledger(1, checking=[*[None] * checks, lost()])
        trained = start(tmp_path / f"{checks}", ledger)
        assert ledger.live == [(0, 1)]
        assert same(trained, start(tmp_path / f"straight {checks}", Ledger(1)))


def test_damage_without_end_ends_the_trainer(tmp_path: Path) -> None:
    ledger = Ledger(1, reading=[damaged()] * 100)
    with pytest.raises(RunError, match="a bit has flipped"):
        start(tmp_path, ledger)
    assert ledger.events.count("lease") == MOST_ABANDONED + 1
    assert ledger.abandoned == MOST_ABANDONED + 2


def test_only_batches_in_a_row_count(tmp_path: Path) -> None:
    each = [*[damaged()] * MOST_ABANDONED, None]
    ledger = Ledger(3, reading=each * 3)
    start(tmp_path, ledger)
    assert len(ledger.live) == 3


def test_a_trainer_that_was_replaced_ends(tmp_path: Path) -> None:
    """The batch is lost, and so is the right to ask for another."""
    ledger = Ledger(2, parts=3)
    lease = ledger.lease

    def replaced(version: int, attempt: str, wait: float, have: int) -> BatchReply:
        if len(ledger.attempts) >= 2:
            raise LeaseLost("another trainer has joined")
        return lease(version, attempt, wait, have)

    ledger.lease = replaced  # type: ignore[method-assign]
    with pytest.raises(LeaseLost, match="another trainer"):
        start(tmp_path, ledger)
    assert ledger.live == []


def test_a_crash_between_two_parts_trains_nothing_twice(tmp_path: Path) -> None:
    ledger = Ledger(3, parts=3, reading=[None] * 4 + [Crash()])
    with pytest.raises(Crash):
        start(tmp_path, ledger)
    trained = start(tmp_path, ledger)
    assert [batch for batch, _ in ledger.live] == [0, 1, 2]
    assert same(trained, start(tmp_path / "straight", Ledger(3, parts=3)))


def test_commits_name_the_oldest_version_that_can_be_restored(tmp_path: Path) -> None:
    """Checkpoints are written every second step, two are kept, and one that is not durable yet does not count."""
    ledger = Ledger(8, before=crash_at("commit b7 8"))
    with pytest.raises(Crash):
        start(tmp_path, ledger)
    soonest = [0, 0, 2, 2, 2, 2, 4]
    assert len(ledger.restorable) == len(soonest)
    assert all(named in (0, 2, 4) and named <= most for named, most in zip(ledger.restorable, soonest, strict=True))
    assert ledger.restorable == sorted(ledger.restorable)


def test_a_run_that_ends_between_two_parts_has_finished(tmp_path: Path) -> None:
    """The prompts are used up: the rest of the batch never comes."""
    ledger = Ledger(2, parts=3)
    lease = ledger.lease

    def over(version: int, attempt: str, wait: float, have: int) -> BatchReply:
        if ledger.live and have:
            return BatchReply(batch=None, phase="finishing")
        return lease(version, attempt, wait, have)

    ledger.lease = over  # type: ignore[method-assign]
    store, checkpoints = NotedStore(tmp_path / "w", ledger), NotedCheckpoints(tmp_path / "c", ledger)
    assert TrainerLoop(ledger, Unigram(), store, checkpoints, TrainerConfig(batch_wait=5.0)).run()
    assert checkpoints.versions() == [1]


def test_a_loop_says_what_it_does_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    monkeypatch.setattr("rillflow.storage.startup.doing", stages.append)
    ledger = Ledger(2)
    start(tmp_path, ledger)
    assert stages == ["reading the last checkpoint", "publishing the first weights", "ready"]
    stages.clear()
    start(tmp_path, ledger)
    assert stages == ["reading the last checkpoint", "taking up the published weights", "ready"]


class Recorder:
    """Remembers the weights that it was handed, as they were then."""

    def __init__(self, ledger: Ledger) -> None:
        self.on = False
        self.begun: list[tuple[int, torch.Tensor]] = []
        ledger.before = self._look

    def _look(self, event: str) -> None:
        """Batches are leased while it samples and committed while it does not; files are written at any time."""
        if event.startswith(("lease", "commit")):
            assert self.on == (event == "lease"), event

    def begin(self, tensors: Any, version: int, probe: Any = None) -> None:
        assert not self.on
        self.on = True
        self.begun.append((version, tensors["embed"].clone()))

    def end(self) -> None:
        self.on = False


def test_every_batch_is_sampled_by_the_version_that_it_trains(tmp_path: Path) -> None:
    ledger = Ledger(batches=4)
    generator = Recorder(ledger)
    worker = start(tmp_path, ledger, Unigram(), generator=generator, steps=3)
    assert [version for version, _ in generator.begun] == [0, 1, 2, 3]
    weights = [tensor for _, tensor in generator.begun]
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(weights))
    assert torch.equal(weights[-1], worker.masters()["embed"])
    assert generator.on, "the evaluation after the last step is still to be played"


def test_who_was_stopped_does_not_play_on(tmp_path: Path) -> None:
    ledger = Ledger(batches=4)
    generator = Recorder(ledger)
    start(tmp_path, ledger, Unigram(), generator=generator, steps=3, stop=lambda: len(ledger.live) == 2)
    assert [version for version, _ in generator.begun] == [0, 1]
    assert not generator.on


def test_a_trainer_that_comes_back_with_nothing_left_to_train_plays_on(tmp_path: Path) -> None:
    """It was killed during the last evaluation."""
    ledger = Ledger(batches=2)
    start(tmp_path, ledger, Unigram(), generator=Recorder(ledger), steps=2)
    again = Recorder(ledger)
    start(tmp_path, ledger, Unigram(), generator=again, steps=2)
    assert [version for version, _ in again.begun] == [2]
    assert again.on


class Silent:
    """An engine that is never woken."""

    def begin(self, tensors: Any, version: int) -> None:
        raise AssertionError("no node of the graph has asked for samples")

    def end(self) -> None:
        raise AssertionError("it never began")


def test_a_graph_that_fetches_never_wakes_its_own_engine(tmp_path: Path) -> None:
    """In a multiplexed run other nodes sample for it; see `chain_of` for a colocated one."""
    ledger, worker = Ledger(batches=3), Unigram()
    worker.generates = False
    start(tmp_path, ledger, worker, generator=Silent(), steps=2)
    assert [version for _, version in ledger.live] == [1, 2]
