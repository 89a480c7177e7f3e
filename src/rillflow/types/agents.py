"""What agents get to see of tools and environments."""

from __future__ import annotations

from typing import Any

from rillflow.types.base import Wire


class Observation(Wire, frozen=True):
    """What an environment says after a reset or a step.

    `reward` is what this step alone earned, `actions` those possible now, where the environment knows them; `info` is
    for the workflow and its metrics, not for the model.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    actions: list[str] | None = None
    info: dict[str, Any] = {}
