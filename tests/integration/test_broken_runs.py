"""Runs that are broken on purpose, each in one way: the first advisory of each names what is wrong with it."""

from __future__ import annotations

import json
import shutil
import time

import msgspec
import pytest

from commands import Cli
from needs import require
from rillflow.observe.advisories import Advisory, FactReader, advise
from rillflow.runtime.folder import RunFolder
from rillflow.weights.model_folder import model_folder
from small_disk import small_disk

pytestmark = pytest.mark.slow

PLAY = '''
import asyncio, time
from pathlib import Path

SECOND = "rollout-1" in Path("/proc/self/cmdline").read_text()  # whether this process is the second node


async def say(episode, messages, most):
    made = await episode.client.chat.completions.create(model=episode.model, messages=messages, max_tokens=most)
    return made.choices[0].message.content or ""


async def answer(episode):
    return await say(episode, [{"role": "user", "content": "How many?"}], 24)


async def answer_by_tool(episode):
    text = await answer(episode)
    return text + await episode.tools.call("look_up", {"word": "stock"})


async def look_up(word: str) -> str:
    """Look a word up on a server that does not answer."""
    await asyncio.sleep(3600)
    return word


async def answer_slowly(episode):
    """Take ten times as long on the second node."""
    began = time.monotonic()
    text = await answer(episode)
    await asyncio.sleep(9 * (time.monotonic() - began) if SECOND else 0)
    return text


async def talk(episode):
    messages = [{"role": "user", "content": "How many?"}]
    for _ in range(4):
        text = await say(episode, messages, 8)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    return text


def nothing(payload, answer):
    return 0.0


def letters(payload, answer):
    return len(answer) / 100


def parity(payload, answer):
    return float(len(answer) % 2)

'''
# An engine that puts tensors into wrong places: those of the second node are turned round after every update.
WRONG = (
    PLAY
    + """
import torch

if SECOND:
    from rillflow.engine.embedded.core import Core

    take = Core._take

    def take_wrong(self, change, version):
        def changed():
            change()
            with torch.inference_mode():
                for _, tensor in self._weights._entries:
                    tensor.copy_(tensor.flip(0))

        take(self, changed, version)

    Core._take = take_wrong
"""
)
RECIPE = """
name: broken
policies: {agent: {model: tiny, engine: {slots: 32, context: 128}}}
workflow: play.py:answer
reward: play.py:parity
data: {prompts: {path: prompts.jsonl}, epochs: 100}
dataflow: {group_size: 8, staleness: 2, attempts: 1, max_failures: 24}
rollout: {episodes: 32, episode_timeout: 600}
trainer: {steps: 4, batch_groups: 2, lr: 1.0e-4, checkpoint_every: 100}
observe: {plot: false, trackers: {tensorboard: false}}
"""
# A template that changes the first message at every turn.
COUNTING = "{{- messages | length ~ '\\n' -}}"


@pytest.fixture
def broken(cli: Cli) -> Cli:
    (cli.cwd / "play.py").write_text(PLAY)
    (cli.cwd / "wrong.py").write_text(WRONG)
    (cli.cwd / "broken.yaml").write_text(RECIPE)
    (cli.cwd / "prompts.jsonl").write_text("".join(f'{{"id": "{n}"}}\n' for n in range(16)))
    return cli


def advisories(cli: Cli, *overrides: str, code: int = 0) -> list[Advisory]:
    """Return the advisories of a run with these changes to the recipe, which ends with `code`."""
    folder = RunFolder.open(cli.run("run", "broken.yaml", *overrides, code=code).folder)
    found = advise(FactReader(folder).read(now=time.time()))
    print(folder.root, *(f"{one.severity}: {one.title}" for one in found), sep="\n")
    return found


def test_a_reward_that_is_always_zero(broken: Cli) -> None:
    first, *_ = advisories(broken, "reward=play.py:nothing", "data.epochs=1", code=1)
    assert first.key == "equal_rewards"
    assert first.title == "All 128 rewards of the latest 16 groups are 0, so nothing can be learnt."
    (run,) = broken.started
    assert first.title in " ".join(run.output().replace("│", " ").split()), "the table at the end of the run has it"
    shown = json.loads(broken.run("advise", str(run.folder), "--json").output())
    assert shown[0] == msgspec.to_builtins(first)


def test_a_reward_that_is_hacked_by_length(broken: Cli) -> None:
    first, *_ = advisories(broken, "reward=play.py:letters", "trainer.lr=2e-3", "trainer.steps=8")
    assert first.key == "length_hack"
    assert "pays for length" in first.title


def test_a_learning_rate_far_too_high(broken: Cli) -> None:
    first, *_ = advisories(broken, "trainer.lr=0.5", "trainer.steps=8", "dataflow.filters=[]")
    assert first.key == "learning_rate"
    assert "learning rate 0.5 is far too high" in first.title


def test_a_tool_that_hangs(broken: Cli) -> None:
    tool = "tools=[{function: play.py:look_up, timeout: 0.2}]"
    first, *_ = advisories(broken, "workflow=play.py:answer_by_tool", tool, "trainer.steps=2")
    assert first.key == "hanging_tool"
    assert first.title.startswith("The tool look_up hangs")
    assert "play.py" in first.why


def test_a_node_that_is_ten_times_slower(broken: Cli) -> None:
    # The run ends when all prompts have been played, those of the slow node too.
    until_played = ("data.epochs=1", "trainer.steps=100", "dataflow.staleness=16")
    first, *_ = advisories(broken, "workflow=play.py:answer_slowly", "rollout.nodes=2", *until_played)
    assert first.key == "slow_node"
    assert first.title.startswith("Node rollout-1 is ")


def test_a_template_that_forks_at_every_turn(broken: Cli) -> None:
    model = broken.cwd / "model"
    shutil.copytree(model_folder("tiny"), model)
    template = model / "chat_template.jinja"
    template.write_text(COUNTING + template.read_text())
    first, *_ = advisories(broken, "workflow=play.py:talk", f"policies.agent.model={model}", "trainer.steps=2")
    assert first.key == "forks"
    assert "the chat template writes an earlier message differently" in first.title


def test_a_full_disk(broken: Cli) -> None:
    require("mounts")
    with small_disk(broken.cwd / "runs", "8m"):
        first, *_ = advisories(broken, "runtime.restarts=0", "trainer.checkpoint_every=1", code=2)
    assert first.key == "full_disk"
    assert "ran full" in first.title


def test_wrong_weights_in_one_engine(broken: Cli) -> None:
    first, *_ = advisories(broken, "workflow=wrong.py:answer", "rollout.nodes=2")
    assert first.key == "refused_weights"
    assert first.title.startswith("The engine of rollout-1 serves nothing because it has wrong weights")
