"""The reward plot that every run leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rillflow.observe.metrics import Metrics

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
