"""`bench.agents_gpu` makes only valid recipes; the lessons of its search agent look like its episodes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import agents_gpu
from bench.common import Report
from rillflow.agents.workflows.question import read_action
from rillflow.config import load_recipe
from rillflow.examples.two_wiki import demonstrations
from rillflow.observe.metrics import Metrics


def arguments(case: str, engine: str, data: Path) -> argparse.Namespace:
    return argparse.Namespace(
        case=case, model="tiny", engine=engine, python="python3", steps=4, lr=1e-6, seed=3, nodes=2, data=str(data),
        limit=9.0, server=["--max-num-seqs=64"],
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "embedded"])
@pytest.mark.parametrize("case", agents_gpu.CASES)
@pytest.mark.parametrize("gym", [True, False])
def test_its_recipes_are_valid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, case: str, engine: str, gym: bool
) -> None:
    name = agents_gpu.CASES[case]
    monkeypatch.setattr(agents_gpu.importlib.util, "find_spec", lambda name: gym or None)
    recipe = load_recipe(name, agents_gpu.overrides(arguments(case, engine, tmp_path), "tiny"))
    policy = recipe.policies["agent"]
    assert (policy.model, policy.engine.kind, policy.trainer.steps, recipe.seed) == ("tiny", engine, 4, 3)
    prepared = case == "reasoning" and not gym
    assert (recipe.data.prompts[0].path is not None) == prepared


def started(program: str) -> subprocess.Popen[bytes]:
    """A process that has got as far as to say so."""
    process = subprocess.Popen([sys.executable, "-c", f"import time\n{program}"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


STOPS = """
try:
    print("here", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    raise SystemExit(130)
"""
GOES_ON = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("here", flush=True)
time.sleep(60)
"""


def test_at_the_deadline_a_command_is_asked_to_stop_and_killed_where_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with started(STOPS) as process:
        assert agents_gpu.ended(process, time.monotonic() + 0.1) == agents_gpu.INTERRUPTED
    monkeypatch.setattr(agents_gpu, "STOPPING", 0.1)
    with started(GOES_ON) as process:
        assert agents_gpu.ended(process, time.monotonic()) < 0


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The first word and the deadline of each command. None of them runs: it leaves a run folder and is stopped."""
    seen: list[tuple[str, float]] = []

    class Process:
        def __init__(self, command: list[str], **_: object) -> None:
            self.word, self.runs = command[3], Path(command[-1])

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None:
            run = self.runs / f"{self.word}-{len(list(self.runs.glob('*')))}"
            (run / "model").mkdir(parents=True)
            (run / "metrics.jsonl").write_text(f'{{"policy": "agent", "step": 1, "reward_mean": {len(seen)}}}\n')

    def ended(process: Process, deadline: float) -> int:
        seen.append((process.word, deadline))
        return agents_gpu.INTERRUPTED

    monkeypatch.setattr(agents_gpu.subprocess, "Popen", Process)
    monkeypatch.setattr(agents_gpu, "ended", ended)
    return seen


def test_commands_share_one_deadline_and_earlier_attempts_are_left_alone(
    commands: list[tuple[str, float]], tmp_path: Path
) -> None:
    for attempt in (1, 2):
        metrics = agents_gpu.play(arguments("search", "vllm", tmp_path), 77.0, "tiny", tmp_path)
        assert [step["reward_mean"] for step in metrics.steps] == [2 * attempt]
    assert commands == [("fit", 77.0), ("run", 77.0)] * 2


def test_what_a_stopped_run_has_is_told() -> None:
    def told(metrics: Metrics) -> list[str]:
        report = Report("agents_gpu")
        agents_gpu.tell(report, "game", metrics, 3.0)
        return [row["name"] for row in report.results]

    ends = ["game: steps", "game: seconds of everything"]
    step = {"policy": "agent", "step": 1, "reward_mean": 0.5}
    first, last = {"version": 0, "reward": 0.1}, {"version": 8, "reward": 0.4}
    rewards = ["game: reward, first 1 steps", "game: reward, last 1 steps"]
    assert told(Metrics()) == ends
    assert told(Metrics([step], [first])) == [*rewards, "game: held-out before", *ends, "game: reward of step 1"]
    assert "game: held-out after 8 versions" in told(Metrics([step], [first, last]))


@pytest.mark.needs("data", "bm25s")
def test_lessons_of_the_search_agent_hold_their_answers() -> None:
    lessons = [row["payload"]["messages"] for row in demonstrations("train", 20, 1, passages=3, characters=400)]
    assert lessons
    for _, search, found, said in lessons:
        asked, answered = read_action(search["content"]), read_action(said["content"])
        assert asked is not None
        assert answered is not None
        assert (asked.kind, answered.kind) == ("search", "answer")
        assert answered.text.lower() in found["content"].lower()
