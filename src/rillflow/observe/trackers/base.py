"""What a tracker is, and the points that it is given: one for each line of `metrics.jsonl` that has numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rillflow.observe.follower import Outcome

_NOT_MEASURED = frozenset({"step", "version", "time", "seq"})


@dataclass(frozen=True)
class Point:
    """Numbers of one moment. `prefix` stands before each name: `""`, `"POLICY/"` or `"heldout/"`.

    `axis` names what `step` counts: optimizer steps of a policy, or versions for the held-out rewards.
    """

    prefix: str
    axis: Literal["step", "version"]
    step: int
    time: float
    values: dict[str, float]

    @property
    def named(self) -> dict[str, float]:
        return {self.prefix + name: value for name, value in self.values.items()}


@dataclass(frozen=True)
class Tracked:
    """The run that a tracker tells of: its name, a key that no other run has, its folder, and its recipe without
    secrets."""

    name: str
    key: str
    folder: Path
    recipe: Mapping[str, Any]
    ids: Mapping[str, str] = field(default_factory=dict)  # what this tracker noted when it was first opened


class Tracker(Protocol):
    """Takes points. Each method may block and may raise; it is called again later with the same points then."""

    @property
    def ids(self) -> dict[str, str]:
        """Names of the run there, kept in the run folder so that a resumed run goes on in it."""
        ...

    def write(self, points: Sequence[Point]) -> None: ...

    def close(self, outcome: Outcome) -> None: ...


def point_of(line: Mapping[str, Any], *, several: bool) -> Point | None:
    """Return the numbers of a line of `metrics.jsonl`, or None if a tracker has no use for it.

    The names of `several` policies are kept apart by the policy's name; a supervised run has none. A rollback is a
    point at the step that the policy went back to.
    """
    match line.get("event"):
        case None:
            return Point(_prefix(line, several), "step", int(line["step"]), line["time"], _numbers(line))
        case "rollback":
            values = {"rollback/version": float(line["version"]), "rollback/orphaned": float(len(line["orphaned"]))}
            return Point(_prefix(line, several), "step", int(line["step"]), line["time"], values)
        case "evaluation" if "version" not in line:  # of a supervised run
            return Point("heldout/", "step", int(line["step"]), line["time"], _numbers(line))
        case "evaluation":
            measured = {name: value for name, value in line.items() if name.startswith("episode/")}
            counted = {name: line[name] for name in ("episodes", "failed") if name in line}
            values = _numbers({"reward": line["reward"], **line.get("by_source", {}), **measured, **counted})
            return Point("heldout/", "version", int(line["version"]), line["time"], values)
        case _:
            return None


def _prefix(line: Mapping[str, Any], several: bool) -> str:
    return f"{line['policy']}/" if several else ""


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name not in _NOT_MEASURED
    }


def flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a recipe as texts by dotted path, for trackers whose settings are not nested."""
    found: dict[str, str] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found
