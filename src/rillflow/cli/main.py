"""The `rillflow` command."""

from __future__ import annotations

from rillflow.cli import (
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
    "app", "dashboard", "environments", "evaluate", "experiments", "label", "observe", "parts", "pool", "rewards",
    "sandbox", "show", "tools", "watching",
]  # fmt: skip
