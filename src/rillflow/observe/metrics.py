"""The numbers of a run: its `metrics.jsonl`, the reward plot, and the summary.

A line of `metrics.jsonl` is one JSON object, of a step or an event. The summary is a small JSON file in the folder of
the run, and the table that `rillflow run` ends with.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rillflow.types import Status, UserError

if TYPE_CHECKING:
    from rich.table import Table

    from rillflow.observe.advisories import Advisory


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


# ---------------------------------------------------------------- the summary

_SHOWN_ERRORS = 3
_FAILURES, _ENDED = "failures", "ended"  # how counts of failed episodes, and of rewarded ends, begin
_ENDS = ("trained", "filtered", "expired", "failed")  # of prompts
_HELD_OUT = "eval."  # how counts of held-out prompts begin
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
    from rich.table import Table  # where trackers run, rich need not be installed
    from rich.text import Text

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
    table.add_row("prompts", _prompts(counts))
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


def _prompts(counts: Mapping[str, int]) -> str:
    """Return how many prompts reached which end and why: `9 admitted: 6 trained, 3 filtered (zero_variance 3)`."""
    ends = ", ".join(_end(counts, end) for end in _ENDS if counts.get(end))
    held_out = {name.removeprefix(_HELD_OUT): n for name, n in counts.items() if name.startswith(_HELD_OUT) and n}
    told = {*_ENDS, "admitted", "eval", _ENDED}
    others = {
        name: n
        for name, n in counts.items()
        if n and not name.startswith(_FAILURES) and name.partition(".")[0] not in told
    }
    parts = [f"{counts.get('admitted', 0)} admitted: {ends or 'none has ended'}"]
    parts += [f"held out: {listed(held_out)}"] if held_out else []
    return "; ".join([*parts, listed(others)] if others else parts)


def _end(counts: Mapping[str, int], end: str) -> str:
    causes = listed(_named(counts, f"{end}."))
    return f"{counts[end]} {end}" + (f" ({causes})" if causes else "")


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
