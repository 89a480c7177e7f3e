"""The loop's order and lineage, against an in-memory ledger, with crashes at every border."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_helpers import learner, random_samples

from rillflow.config import TrainerConfig
from rillflow.errors import CheckpointError, LeaseLost, RunError
from rillflow.trainer.batches import Rows, make_rows
from rillflow.trainer.checkpoint import Checkpoint, Checkpoints
from rillflow.trainer.loop import StepReport, TrainerLoop
from rillflow.trainer.parts import NoBatch
from rillflow.trainer.step import Learner
from rillflow.types import Batch, BatchReply, TrainerJoined
from rillflow.weights import FolderStore


class Crash(Exception):
    """Stands for kill -9: nothing after it runs."""


@dataclass
class Ledger:
    """What the dataflow service remembers: batches in order, and which version each one on the live line made."""

    batches: int
    events: list[str] = field(default_factory=list)
    live: list[tuple[int, int]] = field(default_factory=list)
    used: set[int] = field(default_factory=lambda: {0})
    refuse: set[str] = field(default_factory=set)
    parts: int = 1
    reading: list[Exception | None] = field(default_factory=list)
    checking: list[Exception | None] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    restorable: list[int] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    abandoned: int = 0
    before: Callable[[str], None] = lambda event: None

    def note(self, event: str) -> None:
        self.before(event)
        self.events.append(event)

    # -------- Stream

    def join(self, checkpoint: int, published: int) -> TrainerJoined:
        self.note(f"join {checkpoint}")
        lost = [pair for pair in self.live if pair[1] > checkpoint]
        self.live = [pair for pair in self.live if pair[1] <= checkpoint]
        return TrainerJoined(
            version=checkpoint,
            highest=max(self.used),
            steps=len(self.live),
            orphaned=[version for _, version in lost],
            rolled_back=len(lost),
        )

    def lease(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        if not have:
            self.note("lease")
        self.attempts.append(attempt)
        assert version == (self.live[-1][1] if self.live else 0)
        number = len(self.live)
        if number == self.batches:
            return BatchReply(batch=None, phase="finishing")
        samples, _ = random_samples(number)
        groups = 3 if self.parts == 1 else have + 1
        chosen = [sample for sample in samples if have <= int(sample.id[1]) < groups]
        batch = Batch(
            id=f"b{number}", attempt=attempt, policy="p", version=version, samples=chosen, seconds=60, groups=groups,
            complete=groups == 3,
        )  # fmt: skip
        return BatchReply(batch=batch, phase="training")

    def read(self, part: Batch) -> Rows:
        if self.reading and (error := self.reading.pop(0)):
            raise error
        samples, payload = random_samples(int(part.id[1:]))
        chosen = {sample.id for sample in part.samples}
        return make_rows(part.samples, [row for row, of in zip(payload, samples, strict=True) if of.id in chosen])

    def check(self) -> None:
        if self.checking and (error := self.checking.pop(0)):
            raise error

    def abandon(self) -> None:
        self.abandoned += 1

    def commit(
        self, batch: Batch, version: int, metrics: dict[str, float], *, step: float, wait: float, restorable: int
    ) -> None:
        self.note(f"commit {batch.id} {version}")
        if batch.id in self.refuse:
            raise LeaseLost("the lease is gone")
        assert version not in self.used
        self.used.add(version)
        self.live.append((int(batch.id[1:]), version))
        self.restorable.append(restorable)
        self.metrics.append(metrics)
        self.before("committed")


class NotedStore(FolderStore):
    def __init__(self, folder: Path, ledger: Ledger) -> None:
        super().__init__(folder)
        self._ledger = ledger

    def publish(self, tensors: Any, version: int, parent: int | None) -> None:
        self._ledger.note(f"publish {version}")
        super().publish(tensors, version, parent)


class NotedCheckpoints(Checkpoints):
    def __init__(self, folder: Path, ledger: Ledger) -> None:
        super().__init__(folder, 2)
        self._ledger = ledger

    def save(self, checkpoint: Checkpoint) -> None:
        self._ledger.note(f"checkpoint {checkpoint.state.version}")
        super().save(checkpoint)


def start(folder: Path, ledger: Ledger, **options: Any) -> Learner:
    """One life of a trainer process, from its files to its end."""
    chosen = {name: options.pop(name) for name in ("batch_wait", "steps") if name in options}
    config = TrainerConfig(**{"lr": 1e-2, "micro_tokens": 60, "checkpoint_every": 2, "batch_wait": 5.0, **chosen})
    trained = learner(in_order=True, lr=1e-2, micro_tokens=60)
    TrainerLoop(
        ledger, trained, NotedStore(folder / "w", ledger), NotedCheckpoints(folder / "c", ledger), config, **options
    ).run()
    return trained


def crash_at(wanted: str, times: int = 1) -> Callable[[str], None]:
    left = [times]

    def before(event: str) -> None:
        if event == wanted and left[0]:
            left[0] -= 1
            raise Crash(event)

    return before


def same(one: Learner, other: Learner) -> bool:
    mine, theirs = one.masters() | one.moments(), other.masters() | other.moments()
    return all(torch.equal(mine[name], theirs[name]) for name in mine) and one.steps == other.steps


def test_order_of_a_whole_run(tmp_path: Path) -> None:
    ledger = Ledger(3)
    reports: list[StepReport] = []
    start(tmp_path, ledger, report=reports.append)
    assert ledger.events == [
        "publish 0", "join 0",
        "lease", "publish 1", "commit b0 1",
        "lease", "publish 2", "commit b1 2", "checkpoint 2",
        "lease", "publish 3", "commit b2 3",
        "lease", "checkpoint 3",
    ]  # fmt: skip
    assert [(report.step, report.version) for report in reports] == [(1, 1), (2, 2), (3, 3)]
    assert all("loss" in report.metrics for report in reports)


def test_a_policy_that_has_done_its_steps_asks_for_nothing_more(tmp_path: Path) -> None:
    """Though other policies of the run go on; started again, it ends at once."""
    ledger = Ledger(5)
    start(tmp_path, ledger, steps=2)
    assert ledger.events[-2:] == ["commit b1 2", "checkpoint 2"]
    start(tmp_path, ledger, steps=2)
    assert ledger.events[-1] == "join 2"
    start(tmp_path, ledger, steps=3)
    assert [version for _, version in ledger.live] == [1, 2, 3]


def test_the_head_is_what_was_trained(tmp_path: Path) -> None:
    trained = start(tmp_path, Ledger(2), publish_dtype=torch.bfloat16)
    pulled = FolderStore(tmp_path / "w").pull(2)
    assert all(torch.equal(tensor, pulled[name]) for name, tensor in trained.weights(torch.bfloat16).items())


def test_a_crash_between_publish_and_commit_leaves_an_orphan(tmp_path: Path) -> None:
    ledger = Ledger(4, before=crash_at("commit b2 3"))
    with pytest.raises(Crash):
        start(tmp_path, ledger)
    assert FolderStore(tmp_path / "w").head() == 3
    trained = start(tmp_path, ledger)
    assert ledger.live == [(0, 1), (1, 2), (2, 4), (3, 5)]
    line = FolderStore(tmp_path / "w").line()
    assert (line.head, line.orphaned) == (5, {3})
    assert same(trained, start(tmp_path / "straight", Ledger(4)))


def test_batches_committed_after_the_checkpoint_are_trained_again(tmp_path: Path) -> None:
    ledger = Ledger(4, before=crash_at("publish 4"))
    with pytest.raises(Crash):
        start(tmp_path, ledger)
    assert ledger.live[-1] == (2, 3)
    trained = start(tmp_path, ledger)
    assert ledger.live == [(0, 1), (1, 2), (2, 4), (3, 5)]
    assert same(trained, start(tmp_path / "straight", Ledger(4)))


def test_a_lost_lease_ends_the_process_and_a_restart_recovers(tmp_path: Path) -> None:
    ledger = Ledger(3, refuse={"b2"})
    with pytest.raises(LeaseLost):
        start(tmp_path, ledger)
    ledger.refuse.clear()
    trained = start(tmp_path, ledger)
    assert ledger.live == [(0, 1), (1, 2), (2, 4)]
    assert same(trained, start(tmp_path / "straight", Ledger(3)))


@pytest.mark.parametrize("seed", range(4))
def test_crashes_anywhere_change_nothing_on_the_live_line(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    def dice(event: str) -> None:
        if rng.random() < 0.12:
            raise Crash(event)

    ledger = Ledger(6, before=dice)
    lives = 0
    while True:
        lives += 1
        try:
            trained = start(tmp_path, ledger)
        except Crash:
            continue
        break
    assert lives > 1
    assert [batch for batch, _ in ledger.live] == list(range(6))
    published = [int(event.split()[1]) for event in ledger.events if event.startswith("publish")]
    assert published == sorted(set(published))
    line = FolderStore(tmp_path / "w").line()
    assert line.head == ledger.live[-1][1]
    assert not line.orphaned & {version for _, version in ledger.live}
    assert same(trained, start(tmp_path / "straight", Ledger(6)))


def test_a_damaged_checkpoint_goes_back_one_further(tmp_path: Path) -> None:
    ledger = Ledger(4)
    start(tmp_path, ledger)
    (tmp_path / "c" / "c00000004" / "manifest.json").unlink()
    ledger.batches = 5
    trained = start(tmp_path, ledger)
    assert ledger.live == [(0, 1), (1, 2), (2, 5), (3, 6), (4, 7)]
    assert FolderStore(tmp_path / "w").line().orphaned == {3, 4}
    assert same(trained, start(tmp_path / "straight", Ledger(5)))


def test_no_valid_checkpoint_does_not_start_again_from_nothing(tmp_path: Path) -> None:
    ledger = Ledger(2)
    start(tmp_path, ledger)
    (tmp_path / "c" / "c00000002" / "state.json").unlink()
    with pytest.raises(CheckpointError):
        start(tmp_path, ledger)
    assert len(ledger.live) == 2


def test_a_store_that_was_removed_is_filled_from_the_checkpoint(tmp_path: Path) -> None:
    ledger = Ledger(2)
    trained = start(tmp_path, ledger)
    start(tmp_path / "other", Ledger(0))
    (tmp_path / "w").rename(tmp_path / "gone")
    start(tmp_path, ledger)
    store = FolderStore(tmp_path / "w")
    assert store.versions() == [2]
    assert torch.equal(store.pull(2)["lm_head.weight"], trained.weights(torch.float32)["lm_head.weight"])


def test_versions_that_a_restart_needs_are_not_pruned(tmp_path: Path) -> None:
    start(tmp_path, Ledger(11))
    assert FolderStore(tmp_path / "w").versions() == [0, 8, 9, 10, 11]
    assert Checkpoints(tmp_path / "c", 2).versions() == [10, 11]


def test_a_stop_in_the_middle_of_a_step_commits_nothing_of_it(tmp_path: Path) -> None:
    ledger = Ledger(5)
    polls = iter([False] * 10)
    start(tmp_path, ledger, stop=lambda: next(polls, True))
    committed = len(ledger.live)
    assert 0 < committed < 5
    assert ledger.events[-1] == f"checkpoint {ledger.live[-1][1]}"
    trained = start(tmp_path, ledger)
    assert [version for _, version in ledger.live] == [1, 2, 3, 4, 5]
    assert same(trained, start(tmp_path / "straight", Ledger(5)))


def test_waiting_for_a_batch_ends_with_what_was_waited_for(tmp_path: Path) -> None:
    ledger = Ledger(1)

    def nothing(version: int, attempt: str, wait: float, have: int) -> BatchReply:
        return BatchReply(batch=None, phase="training", waiting_for="2 more groups")

    ledger.lease = nothing  # type: ignore[method-assign]
    with pytest.raises(NoBatch, match="waiting for 2 more groups"):
        start(tmp_path, ledger, batch_wait=0.05)


def test_a_batch_is_asked_for_with_one_attempt_until_it_comes(tmp_path: Path) -> None:
    ledger = Ledger(2)
    lease, attempts = ledger.lease, []

    def slow(version: int, attempt: str, wait: float, have: int) -> BatchReply:
        attempts.append(attempt)
        if len(attempts) % 3:
            return BatchReply(batch=None, phase="training", waiting_for="samples")
        return lease(version, attempt, wait, have)

    ledger.lease = slow  # type: ignore[method-assign]
    start(tmp_path, ledger)
    assert len(attempts) == 9
    assert [len(set(attempts[at : at + 3])) for at in (0, 3, 6)] == [1, 1, 1]
    assert len(set(attempts)) == 3


def test_a_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(1)
    join = ledger.join
    ledger.join = lambda checkpoint, published: join(checkpoint + 3, published)  # type: ignore[method-assign]
    with pytest.raises(RunError, match="different runs"):
        start(tmp_path, ledger)


@pytest.mark.parametrize("damage", ["removed", "a bit", "no manifest"])
def test_a_damaged_head_is_written_again_from_the_checkpoint(tmp_path: Path, damage: str) -> None:
    ledger = Ledger(4)
    trained = start(tmp_path, ledger)
    folder = tmp_path / "w" / "v00000004"
    match damage:
        case "removed":
            folder.rename(tmp_path / "gone")
        case "a bit":
            data = bytearray((folder / "model.safetensors").read_bytes())
            data[-1] ^= 1
            (folder / "model.safetensors").write_bytes(data)
        case "no manifest":
            (folder / "manifest.json").unlink()
    start(tmp_path, ledger)
    pulled = FolderStore(tmp_path / "w").pull(4)
    assert all(torch.equal(tensor, pulled[name]) for name, tensor in trained.weights(torch.float32).items())
    ledger.batches = 5
    assert same(start(tmp_path, ledger), start(tmp_path / "straight", Ledger(5)))


def test_a_run_resumed_with_another_dtype_serves_its_head_in_it(tmp_path: Path) -> None:
    ledger = Ledger(2)
    start(tmp_path, ledger)
    trained = start(tmp_path, ledger, publish_dtype=torch.bfloat16)
    pulled = FolderStore(tmp_path / "w").pull(2)
    assert all(torch.equal(tensor, pulled[name]) for name, tensor in trained.weights(torch.bfloat16).items())
