"""The loop's order and lineage, against an in-memory ledger, with crashes at every border."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_world import Crash, Ledger, NotedCheckpoints, Unigram, crash_at, same, start

from rillflow.config import TrainerConfig
from rillflow.errors import CheckpointError, DiskFull, LeaseLost, RunError
from rillflow.trainer.checkpoint import Checkpoints
from rillflow.trainer.loop import StepReport, TrainerLoop
from rillflow.trainer.stream import NoBatch
from rillflow.types import BatchReply
from rillflow.weights import FolderStore
from soak import repetitions


def test_order_of_a_whole_run(tmp_path: Path) -> None:
    ledger = Ledger(3)
    reports: list[StepReport] = []
    start(tmp_path, ledger, report=reports.append)
    assert ledger.of("join", "lease", "commit", "checkpoint") == [
        "join 0",
        "lease", "commit b0 1",
        "lease", "commit b1 2", "checkpoint 2",
        "lease", "commit b2 3",
        "lease", "checkpoint 3",
    ]  # fmt: skip
    assert [(report.step, report.version) for report in reports] == [(1, 1), (2, 2), (3, 3)]
    assert all("loss" in report.metrics for report in reports)


def test_a_version_is_published_after_its_commit_and_before_the_next(tmp_path: Path) -> None:
    ledger = Ledger(4)
    start(tmp_path, ledger)
    assert ledger.of("published", "commit") == [
        "published 0",
        "commit b0 1", "published 1",
        "commit b1 2", "published 2",
        "commit b2 3", "published 3",
        "commit b3 4", "published 4",
    ]  # fmt: skip
    assert FolderStore(tmp_path / "w").head() == 4


def test_without_delay_a_version_is_published_before_its_commit(tmp_path: Path) -> None:
    ledger = Ledger(3)
    start(tmp_path, ledger, publish_delay=0)
    assert ledger.of("publish", "commit") == [
        "publish 0", "published 0",
        "publish 1", "published 1", "commit b0 1",
        "publish 2", "published 2", "commit b1 2",
        "publish 3", "published 3", "commit b2 3",
    ]  # fmt: skip


def test_where_nothing_may_be_delayed_nothing_is(tmp_path: Path) -> None:
    """On-policy nodes wait for the new weights: these must be published when the commit is acknowledged."""
    ledger = Ledger(2)
    start(tmp_path, ledger, publish_first=True)
    assert ledger.of("published", "commit") == [
        "published 0", "published 1", "commit b0 1", "published 2", "commit b1 2"
    ]  # fmt: skip


def test_the_last_version_is_published_before_the_commit_that_ends_the_run(tmp_path: Path) -> None:
    ledger = Ledger(9)
    start(tmp_path, ledger, steps=3)
    assert ledger.of("published", "commit")[-3:] == ["published 2", "published 3", "commit b2 3"]


def test_training_goes_on_while_a_version_is_written(tmp_path: Path) -> None:
    """The next step begins, reads its batch and computes; only its publication waits."""
    ledger = Ledger(3)

    def hold(event: str) -> None:
        if event == "published 1":
            ledger.lock.release()
            wait_for(lambda: ledger.events.count("lease") == 2)
            ledger.lock.acquire()

    ledger.before = hold
    start(tmp_path, ledger)
    assert ledger.of("lease", "published", "commit b1")[:5] == [
        "published 0", "lease", "lease", "published 1", "commit b1 2"
    ]  # fmt: skip


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_is_published_is_what_was_taken(tmp_path: Path) -> None:
    """Though the weights have changed by the time they are written."""
    worker, ledger = Unigram(), Ledger(2)
    taken: dict[int, Any] = {}
    step = worker.step

    def noted(parts: Any, check: Any, publish: Any) -> Any:
        return step(parts, check, lambda: (taken.update({worker.steps: copied(worker)}), publish())[1])

    worker.step = noted  # type: ignore[method-assign]
    start(tmp_path, ledger, worker)
    for version, weights in taken.items():
        pulled = FolderStore(tmp_path / "w").pull(version)
        assert all(torch.equal(tensor, pulled[name]) for name, tensor in weights.items())


def copied(worker: Unigram) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.weights(torch.float32).items()}


def test_a_policy_that_has_done_its_steps_asks_for_nothing_more(tmp_path: Path) -> None:
    """Though other policies of the run go on; started again, it ends at once."""
    ledger = Ledger(5)
    start(tmp_path, ledger, steps=2)
    assert ledger.of("commit", "checkpoint")[-2:] == ["commit b1 2", "checkpoint 2"]
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
        start(tmp_path, ledger, publish_delay=0)
    assert FolderStore(tmp_path / "w").head() == 3
    trained = start(tmp_path, ledger)
    assert ledger.live == [(0, 1), (1, 2), (2, 4), (3, 5)]
    line = FolderStore(tmp_path / "w").line()
    assert (line.head, line.orphaned) == (5, {3})
    assert same(trained, start(tmp_path / "straight", Ledger(4)))


def test_a_crash_between_commit_and_publish_leaves_a_number_unused(tmp_path: Path) -> None:
    ledger = Ledger(4, before=crash_at("publish 3"))
    with pytest.raises(Crash):
        start(tmp_path, ledger)
    assert (ledger.live[-1], FolderStore(tmp_path / "w").head()) == ((2, 3), 2)
    trained = start(tmp_path, ledger)
    assert ledger.live == [(0, 1), (1, 2), (2, 4), (3, 5)]
    line = FolderStore(tmp_path / "w").line()
    assert (line.head, line.orphaned) == (5, frozenset())
    assert same(trained, start(tmp_path / "straight", Ledger(4)))


def test_a_checkpoint_that_was_durable_before_its_version_was_published(tmp_path: Path) -> None:
    ledger = Ledger(4, before=crash_at("publish 2"))
    with pytest.raises(Crash):
        start(tmp_path, ledger)
    assert Checkpoints(tmp_path / "c", 2).versions() == [2]
    assert FolderStore(tmp_path / "w").versions() == [0, 1]
    trained = start(tmp_path, ledger)
    assert ledger.live == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert same(trained, start(tmp_path / "straight", Ledger(4)))


def test_batches_committed_after_the_checkpoint_are_trained_again(tmp_path: Path) -> None:
    ledger = Ledger(6, before=crash_at("commit b4 5"))
    with pytest.raises(Crash):
        start(tmp_path, ledger, publish_delay=0)
    os.rename(tmp_path / "c" / "c00000004", tmp_path / "gone")
    trained = start(tmp_path, ledger)
    assert ledger.live == [(0, 1), (1, 2), (2, 6), (3, 7), (4, 8), (5, 9)]
    assert same(trained, start(tmp_path / "straight", Ledger(6)))


def test_a_lost_lease_ends_the_process_and_a_restart_recovers(tmp_path: Path) -> None:
    ledger = Ledger(3, refuse={"b2"})
    with pytest.raises(LeaseLost):
        start(tmp_path, ledger)
    assert FolderStore(tmp_path / "w").head() == 2
    ledger.refuse.clear()
    trained = start(tmp_path, ledger)
    assert ledger.live == [(0, 1), (1, 2), (2, 3)], "3 was seen by nobody"
    assert same(trained, start(tmp_path / "straight", Ledger(3)))


@pytest.mark.soak
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("seed", range(repetitions(3, 8)))
def test_crashes_anywhere_change_nothing_on_the_live_line(tmp_path: Path, seed: int, delay: int) -> None:
    rng = random.Random(seed)

    def dice(event: str) -> None:
        if rng.random() < 0.07:
            raise Crash(event)

    ledger = Ledger(6, before=dice)
    lives = 0
    while True:
        lives += 1
        try:
            trained = start(tmp_path, ledger, publish_delay=delay)
        except Crash:
            continue
        break
    assert lives > 1
    assert [batch for batch, _ in ledger.live] == list(range(6))
    published = [int(event.split()[1]) for event in ledger.of("published")]
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
    assert torch.equal(store.pull(2)["head"], trained.weights(torch.float32)["head"])


def test_versions_that_a_restart_needs_are_not_pruned(tmp_path: Path) -> None:
    start(tmp_path, Ledger(11))
    assert FolderStore(tmp_path / "w").versions() == [0, 8, 9, 10, 11]
    assert Checkpoints(tmp_path / "c", 2).versions() == [10, 11]


def test_a_stop_in_the_middle_of_a_step_commits_nothing_of_it(tmp_path: Path) -> None:
    ledger = Ledger(5)
    polls = iter([False] * 40)
    start(tmp_path, ledger, stop=lambda: next(polls, True))
    committed = len(ledger.live)
    assert 0 < committed < 5
    assert ledger.of("commit", "checkpoint")[-1] == f"checkpoint {ledger.live[-1][1]}"
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


# ---------------------------------------------------------------- what fails while the next step computes


def full(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_publication_that_fails_ends_the_trainer_before_its_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(4)
    with monkeypatch.context() as patched:
        ledger.before = lambda event: patched.setattr("os.fsync", full) if event == "publish 2" else None
        with pytest.raises(DiskFull, match="no space left") as error:
            start(tmp_path, ledger)
    assert "rillflow resume" in error.value.hint
    assert [version for _, version in ledger.live] == [1, 2]
    assert (FolderStore(tmp_path / "w").head(), FolderStore(tmp_path / "w").versions()) == (1, [0, 1])
    assert not list((tmp_path / "w").glob(".*"))
    ledger.before = lambda event: None
    trained = start(tmp_path, ledger)
    assert [batch for batch, _ in ledger.live] == [0, 1, 2, 3]
    assert same(trained, start(tmp_path / "straight", Ledger(4)))


def test_a_checkpoint_that_fails_ends_the_trainer_and_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(8)
    fsync = os.fsync

    def fails(event: str) -> None:
        if event == "write checkpoint 4":
            monkeypatch.setattr("rillflow.weights.sealed._write", full)

    ledger.before = fails
    with pytest.raises(DiskFull):
        start(tmp_path, ledger, publish_delay=0)
    assert os.fsync is fsync
    assert Checkpoints(tmp_path / "c", 2).versions() == [2]
    assert set(ledger.restorable) <= {0, 2}
    monkeypatch.undo()
    ledger.before = lambda event: None
    trained = start(tmp_path, ledger)
    assert [batch for batch, _ in ledger.live] == list(range(8))
    assert same(trained, start(tmp_path / "straight", Ledger(8)))


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path: Path) -> None:
    ledger = Ledger(5)
    checkpoints = NotedCheckpoints(tmp_path / "c", ledger)
    write = checkpoints._write

    def slow(*arguments: Any) -> None:
        wait_for(lambda: "commit b2 3" in ledger.events)
        write(*arguments)

    checkpoints._write = slow  # type: ignore[method-assign]
    config = TrainerConfig(checkpoint_every=2, batch_wait=5.0)
    TrainerLoop(ledger, Unigram(), FolderStore(tmp_path / "w"), checkpoints, config).run()
    assert ledger.restorable[:3] == [0, 0, 0]
    found = checkpoints.load(4)
    straight = start(tmp_path / "straight", Ledger(4))
    assert all(torch.equal(tensor, straight.masters()[name]) for name, tensor in found.masters.items())
