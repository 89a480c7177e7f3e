"""Other people's agents at the gateway: each is a command agent in its package's own virtual environment.

It is given what every command agent gets and plays one episode against the embedded engine. The answers that it reports
are compared with the session's transcript, and the samples with the engine's own log, id by id.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from transformers import PreTrainedModel

from engine_log import LoggedEngine, trained_turns
from needs import require
from rillflow.agents.command import CommandAgent
from rillflow.config import SamplingConfig
from rillflow.config.rollout import CommandConfig
from rillflow.contracts import SystemClock
from rillflow.gateway import Gateway, Policy, Renderer, anthropic_url
from rillflow.gateway.trees.record import Sample, SessionRecord
from rillflow.rollout import episode as episodes
from rillflow.types import Prompt, Task

SCRIPTS = Path(__file__).parent / "agents"
VENVS = Path(__file__).parents[2] / ".venv-agents"
SECONDS = 120

# Not for the gateway's sake: these keep the packages from calling home.
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
}

Told = list[list[dict[str, Any]]]  # by question, the turns that the agent saw; see examples/stockroom.py


def python_of(package: str) -> Path:
    """Return the interpreter of a package's environment; skip the test if it is missing."""
    require(f"agents/{package}")
    return VENVS / package / "bin" / "python"


@dataclass(frozen=True)
class Played:
    """The results of an agent: the answers that it reports, the session's record and the engine's log."""

    told: Told
    record: SessionRecord
    samples: list[Sample]
    engine: LoggedEngine

    def check(self) -> None:
        """The agent saw what the record says it saw, and what is trained is what the engine sampled."""
        turns = [(turn["text"], turn["calls"]) for episode in self.told for turn in episode]
        assert _sorted(turns) == _sorted(_said(self.record))
        assert len(turns) == len(self.engine.log) == self.record.calls
        assert sorted(turn for sample in self.samples for turn in trained_turns(sample)) == sorted(self.engine.log)


def _said(record: SessionRecord) -> Iterable[tuple[str, list[Any]]]:
    """Every answer in the transcript once: one that was given to another agent is in that one's history too."""
    seen: set[str] = set()
    for entry in record.transcript():
        for message in entry["messages"]:
            calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
            if message["role"] == "assistant" and not seen.intersection(id for id, _ in calls):
                seen.update(id for id, _ in calls)
                yield message["content"], [[id, function["name"], function["arguments"]] for id, function in calls]


def _sorted(turns: Iterable[Any]) -> list[str]:
    return sorted(json.dumps(turn, sort_keys=True) for turn in turns)


async def play(
    command: list[Any],
    payload: dict[str, Any],
    model: PreTrainedModel,
    folder: Path,
    *,
    sampling: SamplingConfig | None = None,
    context: int = 256,
) -> Played:
    """One episode with `payload`, played by `command`, which may work in `folder`."""
    engine = LoggedEngine(model, slots=8, context=context)
    policies = {"agent": Policy(engine, Renderer.load("tiny"))}
    gateway = Gateway("token", policies, {"agent": sampling or SamplingConfig()})
    agent = CommandAgent(_command(command, folder), folder / "episodes")
    await engine.start()
    url = await gateway.start()
    task = Task(id="t.0", prompt=Prompt("p", payload), group="t", place=0, lane="train", seed=7)
    try:
        told = await _told(agent, gateway, url, task)
        record = gateway.sessions.close(task.id)
    finally:
        agent.close()
        await gateway.stop()
        await engine.close()
    return Played(told, record, record.samples("agent"), engine)


def _command(command: list[Any], folder: Path) -> CommandConfig:
    (folder / "work").mkdir(exist_ok=True)
    environment = QUIET | {"HOME": str(folder)}
    return CommandConfig(run=shlex.join(map(str, command)), folder=str(folder / "work"), environment=environment)


async def _told(agent: CommandAgent, gateway: Gateway, url: str, task: Task) -> Told:
    key = gateway.sessions.open(task.id, seed=task.seed, group=task.group, deadline_seconds=SECONDS)
    async with openai.AsyncOpenAI(api_key="unset", base_url=url) as client:
        running = episodes.RunningEpisode(
            task, client=client, policies=["agent"], url=anthropic_url(url, task.id), api_key=key,
            clock=SystemClock(), seconds=SECONDS, give=gateway.sessions.get(task.id).rewards.give,
        )  # fmt: skip
        left = await episodes.play(agent, running)
    told: Told = json.loads(left["answer"])
    return told
