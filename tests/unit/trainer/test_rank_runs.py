"""Runs with several ranks, in real processes, have the curve of one rank, also after a resume on other ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from dataflow_peer import Peer, recipe_for
from packed_helpers import grouped_model

from commands import Warm
from cutting import cut
from forked_command import ForkedCommand, fork_command
from needs import require
from rillflow.config import write_resolved
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.process import GIVE_UP, STOPPED
from rillflow.trainer.checkpoint import Checkpoints
from rillflow.types import CommitBatch
from rillflow.weights import FolderStore
from rillflow.weights.manifest import check_signature, key_of
from rillflow.wire import LoopThread
from soak import repetitions

# Processes take long to load their libraries where there are more of them than cores.
pytestmark = pytest.mark.slow

STEPS = 12
# Adam divides by the size of a gradient: without a larger eps the rounding of tiny ones would grow with every step.
CALM = {"lr": 2e-3, "eps": 1e-4, "steps": STEPS, "batch_groups": 3, "checkpoint_every": 100}


class Run:
    """A run folder, the service that its trainer finds there, and the trainer's process."""

    def __init__(self, folder: RunFolder, peer: Peer, process: ForkedCommand) -> None:
        self.folder = folder
        self.peer = peer
        self.process = process

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks' processes, once all of them have been started."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            words = child.cmdline()
            if "--rank" in words:
                found[int(words[words.index("--rank") + 1])] = child
        return found

    def ends(self, seconds: float = 400.0) -> int:
        return self.process.wait(seconds)

    def log(self, rank: int = 0) -> str:
        name = "trainer-p" if rank == 0 else f"trainer-p-rank{rank}"
        return self.folder.log(name).read_text(errors="replace")

    def weights(self) -> dict[str, torch.Tensor]:
        store = FolderStore(self.folder.weights("p"))
        return dict(store.pull(store.head()))


@dataclass
class Trainers:
    """Starts trainers, forked from a process that has imported torch."""

    warm: Warm

    def start(self, folder: RunFolder) -> ForkedCommand:
        arguments = ["trainer", str(folder.root), "--policy", "p"]
        process = fork_command(self.warm.path(), arguments, os.environ, folder.log("trainer-p"))
        assert process is not None
        return process

    @contextmanager
    def started(self, tmp_path: Path, total: int, **trainer: Any) -> Iterator[Run]:
        recipe = recipe_for(tmp_path, deterministic=False, **trainer)
        folder = RunFolder.create(recipe, tmp_path)
        peer = Peer(folder.root, total, folder.token)
        thread = LoopThread("peer")
        folder.publish_endpoint("dataflow", thread.run(peer.start(), 10))
        process = self.start(folder)
        try:
            yield Run(folder, peer, process)
        finally:
            process.kill()
            process.wait(120)
            thread.run(peer.stop(), 10)
            thread.close()
            peer.unit.close()

    def curve(self, tmp_path: Path, **trainer: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        """Metrics of every step and the weights after the last."""
        with self.started(tmp_path, STEPS, **{**CALM, **trainer}) as run:
            code = run.ends()
            assert code == 0, run.log()
            return [commit.metrics for commit in run.peer.commits], run.weights()


@pytest.fixture
def trainers(warm: Warm) -> Trainers:
    return Trainers(warm)


SAME = ("loss", "grad_norm", "entropy", "trained_tokens", "samples", "reward_mean", "lr", "clip_fraction", "kl")


def assert_same_curves(
    got: tuple[list[dict[str, float]], dict[str, torch.Tensor]],
    expected: tuple[list[dict[str, float]], dict[str, torch.Tensor]],
) -> None:
    assert len(got[0]) == len(expected[0]) == STEPS
    for mine, other in zip(got[0], expected[0], strict=True):
        for name in SAME:
            if name in other:
                assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=2e-7), name
    assert got[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        torch.testing.assert_close(got[1][name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


ALGORITHMS = {
    "grpo": {"algorithm": "grpo"},
    "ppo": {"algorithm": "ppo", "critic": {"lr": 2e-3}},
    "whitened": {"algorithm": "reinforce_plus_plus"},
    "updates": {"algorithm": "dapo", "updates": 2, "epochs": 2},
    "whitened updates": {"algorithm": "reinforce_plus_plus", "updates": 2, "epochs": 2},
}
# A run with a critic is in test_rank_resume.
CURVES = repetitions(["grpo", "whitened updates"], list(ALGORITHMS))


VARIANTS: list[dict[str, Any]] = [
    {"ranks": 2, "micro_tokens": 17, "sharding": "fsdp", "accumulate": "whole"},
    {"ranks": 2, "micro_tokens": 64},
    {"ranks": 4, "micro_tokens": 30, "sharding": "fsdp"},
    {"ranks": 4, "micro_tokens": 17},
    {"ranks": 4, "micro_tokens": 17, "sharding": "fsdp", "copies": 2, "accumulate": "whole"},
]


@pytest.mark.soak
@pytest.mark.parametrize("name", CURVES)
def test_ranks_shards_and_micro_batches_give_the_same_curve(trainers: Trainers, tmp_path: Path, name: str) -> None:
    algorithm: dict[str, Any] = ALGORITHMS[name]
    expected = trainers.curve(tmp_path / "one", micro_tokens=64, **algorithm)
    losses = [metrics["loss"] for metrics in expected[0]]
    assert len({round(loss, 7) for loss in losses}) == STEPS
    for number, variant in enumerate(VARIANTS[: repetitions(2, 5)] if name == "grpo" else VARIANTS[:1]):
        assert_same_curves(trainers.curve(tmp_path / str(number), **algorithm, **variant), expected)


TEAMS: list[dict[str, Any]] = [
    {"context_ranks": 2, "sharding": "fsdp"},
    {"tensor_ranks": 2},
    {"context_ranks": 2},
]


@pytest.mark.soak
def test_teams_that_share_micro_batches_give_the_same_curve(trainers: Trainers, tmp_path: Path) -> None:
    """Two teams of two ranks, which ask for their team's part of each batch."""
    grouped_model(dtype=torch.float32).save_pretrained(tmp_path / "model")  # heads of keys that two ranks can share
    policy = {"model": str(tmp_path / "model")}
    one: dict[str, Any] = {**CALM, "micro_tokens": 64}
    expected = trainers.curve(tmp_path / "one", policy={**policy, "trainer": one})
    for number, teams in enumerate(TEAMS[: repetitions(2, 3)]):
        settings: dict[str, Any] = {"policy": {**policy, "trainer": {**CALM, "ranks": 4, "micro_tokens": 30, **teams}}}
        with trainers.started(tmp_path / str(number), STEPS, **settings) as run:
            assert run.ends() == 0, run.log()
            got = [commit.metrics for commit in run.peer.commits], run.weights()
            assert {(ask.rank, ask.ranks) for ask in run.peer.leases} == {(0, 2), (1, 2)}
        assert_same_curves(got, expected)


def test_ranks_of_a_sharded_model_publish_deltas(trainers: Trainers, tmp_path: Path) -> None:
    settings = {**CALM, "steps": 4, "ranks": 2, "sharding": "fsdp", "policy": {"engine": {"dtype": "bf16"}}}
    with trainers.started(tmp_path, 4, **settings) as run:
        assert run.ends() == 0, run.log()
        assert "weights_delta_bytes" in run.peer.commits[-1].metrics
        store = FolderStore(run.folder.weights("p"))
        assert set(store.manifest(4).files) == {"delta-00000.rfd", "delta-00001.rfd"}
        check_signature(store.manifest(4), key_of(run.folder.token_of("node")), "the version")
        masters = Checkpoints(run.folder.checkpoints("p"), 2).load(4).masters
        pulled = store.pull(4)
        assert all(torch.equal(pulled[name], tensor.bfloat16()) for name, tensor in masters.items())


@pytest.mark.soak
def test_parts_leave_ranks_without_rows_and_train_the_same(trainers: Trainers, tmp_path: Path) -> None:
    """Parts of one group of four rows among four ranks, and micro-batches of a row."""
    expected = trainers.curve(tmp_path / "one", stream_groups=1)
    for number, sharding in enumerate(repetitions(("fsdp",), ("none", "fsdp"))):
        got = trainers.curve(tmp_path / str(number), ranks=4, stream_groups=1, micro_tokens=8, sharding=sharding)
        assert_same_curves(got, expected)


def wait_for(done: Callable[[], bool], run: Run, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, run.log()
        assert run.process.poll() is None, run.log()
        time.sleep(0.05)


def gone(processes: list[psutil.Process], seconds: float = 60.0) -> bool:
    """Return whether they have ended; orphans may have no process that reaps them."""
    deadline = time.monotonic() + seconds
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, processes))


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("settings", "victim"),
    [({"ranks": 3}, 0), ({"ranks": 3, "sharding": "fsdp"}, 1), ({"ranks": 4, "context_ranks": 2}, 3)],
    ids=["whole", "sharded", "teams"],
)
def test_a_killed_rank_takes_all_down_with_a_clear_log(
    trainers: Trainers, tmp_path: Path, settings: dict[str, Any], victim: int
) -> None:
    with trainers.started(tmp_path, 10_000, steps=10_000, **settings) as run:
        wait_for(lambda: len(run.peer.commits) >= 3, run)
        ranks = run.ranks()
        assert sorted(ranks) == list(range(settings["ranks"]))
        ranks[victim].kill()
        assert run.ends(60.0) == 128 + signal.SIGKILL
        assert gone(list(ranks.values()))
        assert f"rank {victim} ended with code -9: all ranks end and are restarted" in run.log()
        assert "lost its peers" in run.log(2)


@pytest.mark.chaos
def test_a_frozen_rank_is_waited_for_and_one_that_is_cut_off_ends_all(trainers: Trainers, tmp_path: Path) -> None:
    with trainers.started(tmp_path, 10_000, ranks=2, steps=10_000) as run:
        wait_for(lambda: len(run.peer.commits) >= 2, run)
        ranks = run.ranks()
        ranks[0].suspend()
        time.sleep(20.0)
        before = len(run.peer.commits)
        ranks[0].resume()
        wait_for(lambda: len(run.peer.commits) >= before + 2, run)
        require("resets")
        assert cut(ranks[1])
        assert run.ends(60.0) not in (0, GIVE_UP)
        assert gone(list(ranks.values()))


@pytest.mark.chaos
def test_a_killed_launcher_takes_its_ranks_with_it(trainers: Trainers, tmp_path: Path) -> None:
    with trainers.started(tmp_path, 10_000, ranks=2, steps=10_000) as run:
        wait_for(lambda: len(run.peer.commits) >= 2, run)
        ranks = list(run.ranks().values())
        run.process.kill()
        assert gone(ranks)


def test_sigterm_to_the_launcher_leaves_a_checkpoint_to_go_on_from(trainers: Trainers, tmp_path: Path) -> None:
    with trainers.started(tmp_path, 10_000, ranks=2, steps=10_000, checkpoint_every=10_000) as run:
        wait_for(lambda: len(run.peer.commits) >= 3, run)
        ranks = list(run.ranks().values())
        run.process.terminate()
        assert run.ends(120.0) == STOPPED
        assert gone(ranks)
        done = run.peer.commits[-1].version
        assert Checkpoints(run.folder.checkpoints("p"), 2).versions() == [done]


def test_a_row_damaged_on_one_rank_makes_all_take_another_batch(trainers: Trainers, tmp_path: Path) -> None:
    with trainers.started(tmp_path, 4, ranks=2, steps=4) as run:
        sample = run.peer.samples[2][5]
        path = next((run.folder.root / "units" / "unit-0").glob(f"*{sample.row.segment}*"))
        data = bytearray(path.read_bytes())
        data[sample.row.offset + sample.row.length // 2] ^= 1
        path.write_bytes(data)
        assert run.ends() == 0, run.log()
        assert [news.rows for news in run.peer.lost] == [[sample.row]]
        assert [commit.version for commit in run.peer.commits] == [1, 2, 3, 4]
        assert "gave up" in run.log(0) + run.log(1)


def test_a_commit_that_came_too_late_ends_all_ranks(trainers: Trainers, tmp_path: Path) -> None:
    async def refuse(news: CommitBatch) -> None:
        run.peer.accept = len(run.peer.commits) < 2

    with trainers.started(tmp_path, 5, ranks=2, steps=5) as run:
        run.peer.on_commit = refuse
        assert run.ends() not in (0, 3)
        assert "too late" in run.log()


SHORT: list[dict[str, Any]] = [
    {"ranks": 4, "sharding": "fsdp", "copies": 2, "steps": 4},
    {"ranks": 2, "sharding": "none", "copies": 1, "steps": 8},
    {"ranks": 1, "sharding": "none", "steps": STEPS},
]
LONG: list[dict[str, Any]] = [
    {"ranks": 4, "sharding": "fsdp", "steps": 3},
    {"ranks": 2, "sharding": "fsdp", "copies": 1, "steps": 6},
    {"ranks": 4, "sharding": "none", "steps": 9},
    {"ranks": 1, "sharding": "none", "steps": STEPS},
]
LIVES = repetitions(SHORT, LONG)


def go_on(trainers: Trainers, run: Run, **trainer: Any) -> None:
    """Another life of the trainer, under a recipe that was changed."""
    recipe = run.folder.recipe.model_dump()
    recipe["policies"]["p"]["trainer"] |= trainer
    write_resolved(type(run.folder.recipe).model_validate(recipe), run.folder.root / "recipe.yaml")
    assert trainers.start(run.folder).wait(400) == 0, run.log()


@pytest.mark.soak
def test_four_ranks_then_two_then_one(trainers: Trainers, tmp_path: Path) -> None:
    """With a critic, whose state is in the checkpoints, too."""
    ppo: dict[str, Any] = {"algorithm": "ppo", "critic": {"lr": 2e-3}, "checkpoint_every": 2}
    expected = trainers.curve(tmp_path / "one", **ppo)
    with trainers.started(tmp_path / "other", STEPS, **{**CALM, **ppo, **LIVES[0]}) as run:
        assert run.ends() == 0, run.log()
        for life in LIVES[1:]:
            go_on(trainers, run, **life)
        assert [commit.version for commit in run.peer.commits] == list(range(1, STEPS + 1))
        got = [commit.metrics for commit in run.peer.commits], run.weights()
    assert_same_curves(got, expected)
