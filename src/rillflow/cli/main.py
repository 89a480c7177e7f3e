"""The `rillflow` command."""

from __future__ import annotations

from rillflow.cli import (
    advise,
    dashboard,
    environments,
    evaluate,
    experiments,
    label,
    observe,
    parts,
    pool,
    rewards,
    sandbox,
    show,
    tools,
    watching,
)
from rillflow.cli.app import app

__all__ = [
    "advise", "app", "dashboard", "environments", "evaluate", "experiments", "label", "observe", "parts", "pool",
    "rewards", "sandbox", "show", "tools", "watching",
]  # fmt: skip
