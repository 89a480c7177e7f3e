"""Two policies, two trainers, one run: both make their steps, the audit balances, and a damaged row is played again."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

import rillflow
from commands import Cli, all_processes_of, frozen_trainer, steps_of, wait_until
from rillflow.runtime.warm import PATH_ENV

RUN = [
    "trainer.steps=7",
    "trainer.batch_groups=2",
    "trainer.checkpoint_every=2",
    "policies.checker.trainer.steps=5",
    "policies.checker.trainer.keep_checkpoints=1",
    "dataflow.units.count=2",
    "dataflow.units.drop_after=1",
    "data.heldout.arguments.count=8",
]
STEPS = {"solver": 7, "checker": 5}
# The second call finds a finished run and returns it.
RESUMED = """
import sys, rillflow

print([rillflow.resume(sys.argv[1]).summary["policies"]["checker"]["steps"] for _ in range(2)])
"""


def audited(cli: Cli, folder: Path) -> dict[str, dict[str, int]]:
    report = json.loads(cli.run("audit", str(folder), "--json").output())
    assert report["balanced"], report
    return dict(report)


def steps_by_policy(folder: Path) -> dict[str, int]:
    summary = json.loads((folder / "summary.json").read_text())
    return {name: policy["steps"] for name, policy in summary["policies"].items()}


def checkpoints_of(folder: Path, policy: str) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints" / policy).glob("c*"))


@pytest.mark.slow
def test_killed_as_a_whole_both_policies_go_on_at_their_own_pace(cli: Cli) -> None:
    """Of two trainers at different steps, one of which keeps a single checkpoint."""
    run = cli.start("run", "two_policies", *RUN)
    wait_until(lambda: any(run.runs.iterdir()), "the run folder")
    folder = run.folder
    wait_until(lambda: all(checkpoints_of(folder, name) for name in STEPS), "a checkpoint of each", 600)
    run.process.kill()
    for _, process in all_processes_of(folder):
        process.kill()
    run.wait(120)
    wait_until(lambda: not list(all_processes_of(folder)), "all processes to be gone", 120)
    assert steps_of(folder) < sum(STEPS.values()), "killed too late to show anything"

    cli.run("resume", str(folder))
    assert steps_by_policy(folder) == STEPS
    assert (folder / "reward.png").is_file()
    assert len(checkpoints_of(folder, "checker")) == 1
    audited(cli, folder)
    kept = list(rillflow.trajectories(folder, lane="train", status="done"))
    told = {path.policy for one in kept for path in one.samples if path.advantages is not None}
    assert told == set(STEPS), "each trainer tells of its own policy's tokens"
    assert all(one.messages() for one in kept)

    recipe = folder / "recipe.yaml"  # more steps for one of them: the other has nothing left to do
    recipe.write_text(recipe.read_text().replace("steps: 5\n", "steps: 6\n"))
    resumed = cli.start_command(sys.executable, "-c", RESUMED, str(folder), **{PATH_ENV: cli.warm.path()})
    assert resumed.wait(600) == 0, resumed.output()
    assert resumed.output().splitlines()[-1] == "[6, 6]"
    assert steps_by_policy(folder) == STEPS | {"checker": 6}
    audited(cli, folder)


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_process(cli: Cli) -> None:
    run = cli.start("run", "two_policies", *RUN)
    wait_until(lambda: any(run.runs.iterdir()), "the run folder")
    folder = run.folder
    wait_until(lambda: steps_of(folder) >= 1, "a step", 600)
    run.interrupt()
    assert run.wait(60) == 130, run.output()[-4000:]
    assert not list(all_processes_of(folder))
    assert "resume" in run.output()
    audited(cli, folder)


DAMAGED = ["trainer.steps=12", "trainer.batch_groups=4", "evaluation.every=0", "data.heldout.arguments.count=8"]


def wait_until_full(folder: Path) -> None:
    """Wait until nodes write no more rows, because their trainer is as far behind as it may be."""
    sizes = [-1]

    def stands_still() -> bool:
        time.sleep(1.0)
        sizes.append(sum(len(path.read_bytes().rstrip(b"\0")) for path in (folder / "units").rglob("*.seg")))
        return sizes[-1] == sizes[-2]

    wait_until(stands_still, "the nodes to stop", 600)


def flip_bits(folder: Path) -> None:
    """Flip one bit in every 256 bytes of the rows that were written last, which are not trained yet."""
    for path in (folder / "units").rglob("*.seg"):
        end = len(path.read_bytes().rstrip(b"\0"))
        with open(path, "r+b") as file:
            for at in range(max(end - 100_000, 0), end, 256):
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 0x40]))


@pytest.mark.chaos
def test_damaged_rows_are_set_aside_and_their_episodes_played_again(cli: Cli) -> None:
    run = cli.start("run", "stockroom", *DAMAGED)
    wait_until(lambda: any(run.runs.iterdir()), "the run folder")
    folder = run.folder
    for turn in range(3):
        wait_until(lambda turn=turn: steps_of(folder) >= 2 * turn + 2, f"step {2 * turn + 2}", 600)
        with frozen_trainer(folder):
            wait_until_full(folder)
            flip_bits(folder)
    assert run.wait(600) == 0, run.output()[-4000:]
    counts = audited(cli, folder)["counts"]
    assert counts["quarantined"] > 0, counts
