"""Two policies, two trainers, one run: both make their steps, the audit balances, and a damaged row is played again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Cli, all_processes_of, steps_of, wait_until

RUN = ["trainer.steps=5", "trainer.checkpoint_every=2", "dataflow.units.count=2"]


def audited(cli: Cli, folder: Path) -> dict[str, dict[str, int]]:
    report = json.loads(cli.run("audit", str(folder), "--json").output())
    assert report["balanced"], report
    return dict(report)


@pytest.mark.slow
def test_both_policies_train_at_their_own_pace(cli: Cli) -> None:
    run = cli.run("run", "two_policies", *RUN, "policies.checker.trainer.steps=3")
    summary = json.loads((run.folder / "summary.json").read_text())
    assert {name: policy["steps"] for name, policy in summary["policies"].items()} == {"solver": 5, "checker": 3}
    assert (run.folder / "reward.png").is_file()
    audited(cli, run.folder)


def checkpoints_of(folder: Path, policy: str) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints" / policy).glob("c*"))


@pytest.mark.slow
def test_killed_as_a_whole_it_goes_on(cli: Cli) -> None:
    """Of two trainers at different steps, one of which keeps a single checkpoint."""
    steps = {"solver": 7, "checker": 5}
    run = cli.start(
        "run", "two_policies", "trainer.steps=7", "trainer.checkpoint_every=2", "trainer.batch_groups=4",
        "policies.checker.trainer.steps=5", "policies.checker.trainer.keep_checkpoints=1", "dataflow.units.count=2",
        "dataflow.units.drop_after=1",
    )  # fmt: skip
    wait_until(lambda: any(run.runs.iterdir()), "the run folder")
    folder = run.folder
    wait_until(lambda: all(checkpoints_of(folder, name) for name in steps), "a checkpoint of each", 180)
    run.process.kill()
    for _, process in all_processes_of(folder):
        process.kill()
    run.wait(10)
    wait_until(lambda: not list(all_processes_of(folder)), "all processes to be gone", 10)
    assert steps_of(folder) < sum(steps.values()), "killed too late to show anything"

    cli.run("resume", str(folder))
    summary = json.loads((folder / "summary.json").read_text())
    assert {name: policy["steps"] for name, policy in summary["policies"].items()} == steps
    assert len(checkpoints_of(folder, "checker")) == 1
    audited(cli, folder)

    recipe = folder / "recipe.yaml"  # more steps for one of them: the other has nothing left to do
    recipe.write_text(recipe.read_text().replace("steps: 5\n", "steps: 6\n"))
    cli.run("resume", str(folder))
    summary = json.loads((folder / "summary.json").read_text())
    assert {name: policy["steps"] for name, policy in summary["policies"].items()} == steps | {"checker": 6}
    audited(cli, folder)


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_process(cli: Cli) -> None:
    run = cli.start("run", "two_policies", *RUN)
    wait_until(lambda: any(run.runs.iterdir()), "the run folder")
    folder = run.folder
    wait_until(lambda: steps_of(folder) >= 1, "a step", 120)
    run.interrupt()
    assert run.wait(20) == 130, run.output()[-4000:]
    assert not list(all_processes_of(folder))
    assert "resume" in run.output()
    audited(cli, folder)


def flip_bits(folder: Path) -> None:
    """One bit in every 256 bytes of the rows that were written last: those that nobody has trained on yet."""
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
    run = cli.start("run", "stockroom", "trainer.steps=12", "trainer.batch_groups=4", "evaluation.every=0")
    wait_until(lambda: any(run.runs.iterdir()), "the run folder")
    folder = run.folder
    for turn in range(3):
        wait_until(lambda turn=turn: steps_of(folder) >= 2 * turn + 2, f"step {2 * turn + 2}", 120)
        flip_bits(folder)
    assert run.wait(240) == 0, run.output()[-4000:]
    counts = audited(cli, folder)["counts"]
    assert counts["quarantined"] > 0, counts
