"""A short training run with vLLM as its engine: whole versions and deltas go into a server that samples."""

from __future__ import annotations

import json

import pytest

from commands import Cli, processes_of
from trained_tokens import trained_samples

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

SHORT = [
    "trainer.steps=6",
    "trainer.batch_groups=2",
    "data.heldout.arguments={split: heldout, count: 8, seed: 2}",
    "rollout.episodes=16",
    "policies.agent.weights.snapshot_every=3",
]


def test_a_short_run_trains_on_what_vllm_samples(cli: Cli, vllm_python: str) -> None:
    server = "policies.agent.engine.server"
    ours = [f"{server}.python={vllm_python}", f"{server}.decodes_deltas=true"]
    run = cli.run("run", "vllm_tiny", *SHORT, *ours, seconds=600)
    folder = run.folder
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6
    assert processes_of(folder) == {}, "nor a server"
    assert json.loads(cli.run("audit", str(folder), "--json").output())["balanced"]
    versions = {int(version) for sample in trained_samples(folder) for version in sample.version_T}
    assert max(versions) >= 2, "later answers were sampled by trained weights"
    published = {path.suffix for path in (folder / "weights" / "agent").glob("v*/*")}
    assert published >= {".rfd", ".safetensors"}, "deltas, and whole versions between them"
    words = "\n".join(path.read_text() for path in (folder / "logs").glob("rollout-*.log"))
    assert "not loaded" not in words
    assert "to the engine as a whole" not in words
    assert "decoded by the engine" in words


def test_a_short_lora_run_gives_vllm_the_adapters_alone(cli: Cli, vllm_python: str) -> None:
    lora = ["trainer.lora={rank: 4, alpha: 8}", "trainer.lr=1e-3", "trainer.steps=4"]
    ours = [f"policies.agent.engine.server.python={vllm_python}", "policies.agent.engine.server.adapters=native"]
    run = cli.run("run", "vllm_tiny", *SHORT, *lora, *ours, seconds=600)
    folder = run.folder
    assert json.loads((folder / "summary.json").read_text())["steps"] == 4
    assert processes_of(folder) == {}
    assert json.loads(cli.run("audit", str(folder), "--json").output())["balanced"]
    assert max(int(version) for sample in trained_samples(folder) for version in sample.version_T) >= 1
    assert {path.name for path in (folder / "weights" / "agent").glob("v*[1-9]/*")} == {
        "adapter.safetensors",
        "manifest.json",
    }
    words = "\n".join(path.read_text() for path in (folder / "logs").glob("rollout-*.log"))
    assert "added by the engine" in words
    assert "not loaded" not in words
    assert "merging the adapter" not in words
