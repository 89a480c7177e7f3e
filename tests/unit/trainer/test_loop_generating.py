"""The loop of a trainer that samples by itself: each batch with the weights that it trains, and on after the last."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from loop_world import Ledger, Unigram, start


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
    """An engine that nobody wakes."""

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
