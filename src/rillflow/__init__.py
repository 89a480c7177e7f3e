"""Rillflow: dataflow-oriented reinforcement learning for agentic language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rillflow.storage.trajectories import Trajectories

__version__ = "0.1.0"
__all__ = ["__version__", "trajectories"]


def trajectories(
    run: str | Path,
    *,
    step: int | tuple[int | None, int | None] | None = None,
    policy: str | Iterable[str] | None = None,
    role: str | Iterable[str] | None = None,
    reward: tuple[float | None, float | None] | None = None,
    version: int | tuple[int | None, int | None] | None = None,
    status: str | Iterable[str] | None = None,
    lane: str | Iterable[str] | None = None,
    kept: str | Iterable[str] | None = None,
    prompt: str | Iterable[str] | None = None,
) -> Trajectories:
    """Return the trajectories that a run has kept, of a live run or a finished one.

    Filters: `step` and `version` are a number or a pair of the first and the last, `reward` is such a pair, in which
    None leaves an end open; a trajectory passes `version` if a trained token of it may be of such a version. The
    others are one name or several.

        for trajectory in rillflow.trajectories("runs/…", status="failed"):
            print(trajectory.info.cause, trajectory.messages()[-1])
    """
    from rillflow.storage.trajectories import Trajectories

    return Trajectories(
        run,
        step=step,
        policy=policy,
        role=role,
        reward=reward,
        version=version,
        status=status,
        lane=lane,
        kept=kept,
        prompt=prompt,
    )
