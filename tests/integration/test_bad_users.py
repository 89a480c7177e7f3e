"""Workflows and rewards that go wrong in every way, beside good ones: each is counted by cause, nothing hangs."""

from __future__ import annotations

import json

import pytest

import rillflow
from commands import Cli

PLAY = """
import asyncio, random

async def play(episode):
    kind = episode.payload["kind"]
    if kind == "raises":
        raise RuntimeError("the workflow is broken")
    if kind == "hangs":
        await asyncio.sleep(3600)
    if kind == "silent":
        return "no model was called"
    words = "word " * 4000 if kind == "long" else "Say a colour."
    reply = await episode.client.chat.completions.create(
        model=episode.model, messages=[{"role": "user", "content": words}], max_tokens=4
    )
    return reply.choices[0].message.content

def reward(payload, answer):
    if payload["kind"] == "nan":
        return float("nan")
    if payload["kind"] == "bad_reward":
        raise ValueError("the reward is broken")
    return random.random()
"""
RECIPE = """
name: bad-users
policies: {agent: {model: tiny}}
workflow: play.py:play
reward: play.py:reward
data: {prompts: {path: prompts.jsonl}, epochs: 1, shuffle: false}
dataflow: {group_size: 2, attempts: 2, staleness: 8}
rollout: {episode_timeout: 3, episodes: 32}
trainer: {steps: 100, batch_groups: 2, lr: 1.0e-4}
"""
BAD = {
    "raises": "workflow_error",
    "hangs": "timeout",
    "silent": "no_model_call",
    "long": "context_overflow",
    "nan": "reward_error",
    "bad_reward": "reward_error",
}


@pytest.mark.slow
def test_bad_workflows_and_rewards_are_counted_by_cause(cli: Cli) -> None:
    kinds = ["good", "good", *BAD, "good", "good"]
    (cli.cwd / "play.py").write_text(PLAY)
    (cli.cwd / "bad.yaml").write_text(RECIPE)
    (cli.cwd / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": k + str(i), "kind": k}) + "\n" for i, k in enumerate(kinds))
    )
    run = cli.run("run", "bad.yaml")
    audited = json.loads(cli.run("audit", str(run.folder), "--json").output())
    assert audited["balanced"], audited
    counts = audited["counts"]
    for cause in set(BAD.values()):
        expected = sum(value == cause for value in BAD.values())
        assert counts[f"train.failed.{cause}"] == expected, counts
    assert counts["train.trained"] == 4, counts
    failed = list(rillflow.trajectories(run.folder, status="failed"))
    assert {one.info.cause for one in failed} == set(BAD.values())
    raised = [one for one in failed if one.info.cause == "workflow_error"]
    assert "the workflow is broken" in raised[0].error
    assert "in play" in raised[0].error
    unrewarded = [one for one in failed if one.info.cause == "reward_error"]
    assert unrewarded[0].messages()[0]["content"] == "Say a colour."
    assert unrewarded[0].info.trained > 0


@pytest.mark.slow
def test_a_workflow_that_never_works_ends_the_run(cli: Cli) -> None:
    (cli.cwd / "play.py").write_text(PLAY)
    (cli.cwd / "bad.yaml").write_text(RECIPE)
    (cli.cwd / "prompts.jsonl").write_text('{"kind": "raises"}\n')
    run = cli.run("run", "bad.yaml", "data.epochs=1000", "dataflow.max_failures=10", code=1)
    assert "the workflow is broken" in run.output()
    assert json.loads((run.folder / "state.json").read_text())["state"] == "failed"
