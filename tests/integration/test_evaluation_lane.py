"""Several benchmarks beside training, the best version kept and found again; an evaluation that is stopped goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Cli, wait_until

pytestmark = pytest.mark.slow

GENERATOR = "rillflow.examples.stockroom:prompts"
SOURCES = ", ".join(
    f"{{name: {name}, generator: '{GENERATOR}', arguments: {{split: heldout, count: {count}, seed: {seed}}}}}"
    for name, count, seed in (("first", 8, 2), ("second", 4, 3))
)


def test_the_best_version_by_the_average_over_sources_is_kept_and_evaluated(cli: Cli) -> None:
    run = cli.run(
        *("run", "stockroom", "trainer.steps=6", "trainer.batch_groups=2", "rollout.episodes=16"),
        *("evaluation.every=1", "policies.agent.weights.keep=1", "trainer.keep_checkpoints=1"),
        f"data.heldout=[{SOURCES}]",
    )
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if line.get("event") == "evaluation"]
    assert len(rounds) >= 3
    for one in rounds:
        assert set(one["by_source"]) == {"first", "second"}
        assert one["reward"] == pytest.approx(sum(one["by_source"].values()) / 2)
    assert "second" in run.output(), "the summary has a row for each source"
    best = max(rounds, key=lambda one: (one["reward"], one["version"]))

    said = cli.run("export", str(run.folder), "best", "--version", "best").output()
    assert f"version {best['version']} of agent (the best: held-out reward {best['reward']:.3f})" in said

    cli.run("eval", str(run.folder), "--version", "best", "--samples", "2", "--out", "scores")
    report = json.loads((cli.cwd / "scores" / "report.json").read_text())
    assert report["checkpoint"]["versions"] == {"agent": best["version"]}
    assert {name: one["questions"] for name, one in report["benchmarks"].items()} == {"first": 8, "second": 4}


@pytest.mark.needs("reasoning-gym")
def test_an_evaluation_that_is_stopped_leaves_its_records_and_goes_on(cli: Cli, tmp_path: Path) -> None:
    command = ("eval", "tiny", "--on", "reasoning_gym:chain_sum", "--limit", "40", "--samples", "2", "--out", "e")
    records = tmp_path / "e" / "records" / "reasoning_gym-chain_sum.jsonl"
    started = cli.start(*command, "engine.slots=1", "--max-tokens", "16")
    wait_until(lambda: records.is_file() and records.read_bytes().count(b"\n") >= 3, "records", 600)
    started.interrupt()
    assert started.wait(60) == 130, started.output()
    assert "the same command goes on" in started.output()
    left = records.read_bytes()
    assert 3 <= left.count(b"\n") < 80
    cli.run(*command, "engine.slots=32", "--max-tokens", "16")
    assert records.read_bytes().startswith(left)
    assert records.read_bytes().count(b"\n") == 80
