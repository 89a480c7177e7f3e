"""Reads `metrics.jsonl` of a run, one JSON object a line, steps and events; and draws the reward plot that every run
leaves behind.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec


@dataclass
class Metrics:
    """Steps of all policies and evaluations, of the live lines of weights.

    A rollback takes back the policy's steps of the versions that died, and the evaluations asked for at them, which
    go by the versions of the run's first policy.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    rollbacks: list[dict[str, Any]] = field(default_factory=list)

    def of(self, policy: str) -> list[dict[str, Any]]:
        """The steps of one policy."""
        return [step for step in self.steps if step["policy"] == policy]

    def reached(self, target: float | None) -> dict[str, Any] | None:
        """Return the first evaluation that has reached `target`; one with failed episodes does not count."""
        if target is None:
            return None
        found = (done for done in self.evaluations if done["reward"] is not None and not done["failed"])
        return next((done for done in found if done["reward"] >= target), None)

    def roll_back(self, line: dict[str, Any], first: str) -> None:
        kept, policy = int(line["version"]), line["policy"]
        self.rollbacks.append(line)
        self.steps = [step for step in self.steps if step["policy"] != policy or step["version"] <= kept]
        if policy == first:
            self.evaluations = [done for done in self.evaluations if done["version"] <= kept]


class MetricsReader:
    """Follows the file: each call of `new` yields the lines that have been completed since the last one.

    `at` is the byte up to which it has read; a reader that begins there goes on after another.
    """

    def __init__(self, path: Path, at: int = 0) -> None:
        self._path = path
        self.at = at

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self.at += len(line)
                try:
                    yield _decoded(line)
                except ValueError:
                    continue  # torn by a crash: the ledger has its content

    def left(self) -> int:
        """Return how many whole lines have not been read."""
        if not self._path.is_file():
            return 0
        with open(self._path, "rb") as file:
            file.seek(self.at)
            return sum(line.endswith(b"\n") for line in file)


def _decoded(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:  # NaN and Infinity, which other writers may have put there
        return json.loads(line)


def read_metrics(path: Path, first: str) -> Metrics:
    """Return the metrics of a run whose first policy is `first`."""
    metrics = Metrics()
    for line in MetricsReader(path).new():
        match line.get("event"):
            case "rollback":
                metrics.roll_back(line, first)
            case "evaluation":
                metrics.evaluations.append(line)
            case None:
                metrics.steps.append(line)
    return metrics


# ---------------------------------------------------------------- the reward plot


_COLOURS = (("#9ecae1", "#2171b5"), ("#a1d99b", "#238b45"), ("#bcbddc", "#6a51a3"), ("#fdae6b", "#a63603"))


def plot_reward(metrics: Metrics, policies: Sequence[str], path: Path, title: str) -> None:
    """Training reward by step and its running mean for each policy, and the held-out evaluations, as a PNG."""
    # Imported here: matplotlib takes a second, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for policy, (light, strong) in zip(policies, itertools.cycle(_COLOURS)):
        rewards = [step["reward"] for step in metrics.of(policy)]
        steps = list(range(1, len(rewards) + 1))
        name = f"{policy}: " if len(policies) > 1 else ""
        axes.plot(steps, rewards, color=light, linewidth=1, label=f"{name}training episodes")
        axes.plot(steps, running_mean(rewards, 8), color=strong, linewidth=2, label=f"{name}mean of 8 steps")
    # A round whose episodes all failed has no reward.
    rounds = [done for done in metrics.evaluations if done["reward"] is not None]
    if rounds:
        by_version = {step["version"]: index for index, step in enumerate(metrics.of(policies[0]), 1)}
        at = [by_version.get(e["version"], 0) for e in rounds]
        axes.plot(at, [e["reward"] for e in rounds], "o--", color="#d94801", label="held-out prompts")
    axes.set(xlabel="optimizer step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(path)


def running_mean(values: list[float], width: int) -> list[float]:
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]
