"""What a run amounts to: a small JSON beside it, and the table that `rillflow run` ends with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from rillflow.observe.metrics import Metrics
from rillflow.types import Status

_FAILURES = "failures"  # how counts of failed episodes begin


def summarise(
    metrics: Metrics, status: Status, seconds: float, since: float = 0.0, *, target: float | None = None
) -> dict[str, Any]:
    """The figures people ask for first. `seconds` began at `since`: a resumed run has older steps, too. `target` is the
    held-out reward that was to end the run."""
    steps = metrics.steps
    recent = sum(int(step["samples"]) for step in steps if step["time"] >= since)
    evaluations = [_evaluation(line) for line in metrics.evaluations]
    return {
        "end": status.reason,
        "steps": status.steps,
        "policies": {name: {"steps": one.steps, "version": one.version} for name, one in status.policies.items()},
        "seconds": round(seconds, 1),
        "samples_trained": sum(int(step["samples"]) for step in steps),
        "samples_per_second": round(recent / seconds, 2) if seconds else 0.0,
        "staleness_mean": _mean([step["staleness_mean"] for step in steps]),
        "staleness_max": max((step["staleness_max"] for step in steps), default=0),
        "consistency": _consistency(steps),
        "wait_fraction": status.wait_fraction,
        "rollbacks": len(metrics.rollbacks),
        "heldout": evaluations,
        "target": None if target is None else _target(metrics, target),
        "counts": status.counts,
    }


def summary_table(summary: dict[str, Any], folder: Path, plot: Path | None) -> Table:
    table = Table(title="Run summary", show_header=False, title_justify="left")
    heldout = summary["heldout"]
    if heldout:
        first, last = heldout[0], heldout[-1]
        table.add_row("held-out reward", f"{_reward(first['reward'])} before, {_reward(last['reward'])} after")
        for source, after in last.get("by_source", {}).items():
            before = first.get("by_source", {}).get(source)
            table.add_row(f"  {source}", f"{_reward(before)} before, {_reward(after)} after")
    if summary["target"] is not None:
        table.add_row("target", _reached(summary["target"]))
    table.add_row("optimizer steps", _steps(summary))
    table.add_row("time", f"{summary['seconds']:.0f} s, {summary['samples_per_second']:.1f} trained samples/s")
    table.add_row("staleness", f"mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']:.0f}")
    if summary["consistency"] is not None:
        table.add_row("engine and trainer", _apart(summary["consistency"]))
    table.add_row("trainer waited", f"{summary['wait_fraction']:.0%} of its time")
    counts, failed = summary["counts"], failures(summary["counts"])
    table.add_row("prompts", ", ".join(f"{name} {n}" for name, n in counts.items() if n and _FAILURES not in name))
    if failed:
        told = ", ".join(f"{cause} {n}" for cause, n in failed.items())
        table.add_row("failed episodes", f"{told}; each traceback is in {folder / 'logs'}")
    table.add_row("ended", summary["end"])
    if plot is not None:
        table.add_row("reward plot", str(plot))
    table.add_row("run folder", str(folder))
    return table


def failures(counts: Mapping[str, int]) -> dict[str, int]:
    """Return how many episodes failed, by cause."""
    prefix = f"{_FAILURES}."
    return {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix) and count}


def _steps(summary: dict[str, Any]) -> str:
    policies = summary["policies"]
    if len(policies) < 2:
        return str(summary["steps"])
    return ", ".join(f"{name} {policy['steps']}" for name, policy in policies.items())


def _consistency(steps: list[dict[str, Any]]) -> dict[str, float] | None:
    """How far log-probs of engine and trainer were apart on fresh tokens; None where no step had any."""
    measured = [step for step in steps if "consistency/mean" in step]
    if not measured:
        return None
    tokens = sum(step["consistency/tokens"] for step in measured)
    return {
        "mean": sum(step["consistency/mean"] * step["consistency/tokens"] for step in measured) / tokens,
        "max": max(step["consistency/max"] for step in measured),
        "ratio": sum(step["consistency/ratio"] * step["consistency/tokens"] for step in measured) / tokens,
        "tokens": tokens,
    }


def _apart(seen: dict[str, float]) -> str:
    return (
        f"log-probs {seen['mean']:.2g} apart on average, {seen['max']:.2g} at most, ratio {seen['ratio']:.4f} "
        f"({seen['tokens']:.0f} fresh tokens)"
    )


def _evaluation(line: dict[str, Any]) -> dict[str, Any]:
    sources = line.get("by_source")
    return {"version": line["version"], "reward": line["reward"]} | ({"by_source": sources} if sources else {})


def _target(metrics: Metrics, target: float) -> dict[str, Any]:
    round = metrics.reached(target)
    where = {} if round is None else {"version": round["version"], "step": round["step"]}
    return {"reward": target, "reached": round is not None, **where}


def _reached(target: dict[str, Any]) -> str:
    if not target["reached"]:
        return f"{target['reward']:g} was not reached"
    return f"{target['reward']:g} was reached by version {target['version']} (step {target['step']})"


def _reward(reward: float | None) -> str:
    """A round whose episodes all failed has none."""
    return "–" if reward is None else f"{reward:.3f}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
