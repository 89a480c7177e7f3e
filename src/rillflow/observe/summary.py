"""The summary of a run: a small JSON file in its folder, and the table that `rillflow run` ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from rillflow.observe.advisories import Advisory
from rillflow.observe.metrics import Metrics
from rillflow.types import Status, UserError

_SHOWN_ERRORS = 3
_FAILURES, _ENDED = "failures", "ended"  # how counts of failed episodes, and of rewarded ends, begin
_REWARDABLE = ("agent_error", "workflow_error", "context_overflow", "timeout")  # what `ends` may name
_PATHS = ("forks", "tokens_forwarded", "tokens_trained")  # what every episode measures of its paths


def summarise(
    metrics: Metrics,
    status: Status,
    seconds: float,
    since: float = 0.0,
    *,
    target: float | None = None,
    advisories: Sequence[Advisory] = (),
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
        "paths": _paths(steps),
        "wait_fraction": status.wait_fraction,
        "rollbacks": len(metrics.rollbacks),
        "heldout": evaluations,
        "target": None if target is None else _target(metrics, target),
        "counts": status.counts,
        "notes": status.notes,
        "errors": [msgspec.to_builtins(error) for error in status.errors],
        "advisories": [msgspec.to_builtins(advisory) for advisory in advisories],
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
    if summary["paths"] is not None:
        table.add_row("an episode's paths", _path_row(summary["paths"]))
    table.add_row("trainer waited", f"{summary['wait_fraction']:.0%} of its time")
    counts, failed, ended = summary["counts"], failures(summary["counts"]), rewarded_ends(summary["counts"])
    shown = {name: n for name, n in counts.items() if n and not name.startswith((_FAILURES, f"{_ENDED}."))}
    table.add_row("prompts", listed(shown))
    if failed:
        hint = "; `ends` can make such an end a reward" if any(cause in failed for cause in _REWARDABLE) else ""
        table.add_row("failed episodes", f"{listed(failed)}; each traceback is in {folder / 'logs'}{hint}")
    for error in summary["errors"][:_SHOWN_ERRORS]:
        table.add_row("error of user code", Text(described(msgspec.convert(error, UserError))))
    if ended:
        table.add_row("rewarded ends", listed(ended))
    for advisory in summary["advisories"][:1]:
        table.add_row(advisory["severity"], Text(f"{advisory['title']} {advisory['what_to_do']}"))
    table.add_row("ended", summary["end"])
    if plot is not None:
        table.add_row("reward plot", str(plot))
    table.add_row("run folder", str(folder))
    return table


def described(error: UserError) -> str:
    """Return an error of user code as people read it: how often, what and where, and its traceback."""
    times = "once" if error.count == 1 else f"{error.count} times"
    return f"{error.kind}, {times}: {error.error}" + (f"\n{error.trace}" if error.trace else "")


def failures(counts: Mapping[str, int]) -> dict[str, int]:
    """Return how many episodes failed, by cause."""
    return _named(counts, f"{_FAILURES}.")


def rewarded_ends(counts: Mapping[str, int]) -> dict[str, int]:
    """Return how many episodes ended without an answer and have a reward by the recipe's `ends`, by how they ended."""
    return _named(counts, f"{_ENDED}.")


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items())


def _named(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
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


def _paths(steps: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return how many forks and tokens the episodes of a step had, on average; None where no step measured them."""
    measured = [step for step in steps if all(f"episode/{name}" in step for name in _PATHS)]
    if not measured:
        return None
    return {name: _mean([step[f"episode/{name}"] for step in measured]) for name in _PATHS}


def _path_row(paths: dict[str, float]) -> str:
    forks, forwarded, trained = (paths[name] for name in _PATHS)
    return f"{forks:.1f} forks, {forwarded:.0f} tokens forwarded for {trained:.0f} trained"


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
