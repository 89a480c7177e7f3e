"""The `rillflow` command."""

from __future__ import annotations

from rillflow.cli import dashboard, environments, evaluate, experiments, label, parts, pool, rewards, sandbox, tools
from rillflow.cli.app import app

__all__ = [
    "app", "dashboard", "environments", "evaluate", "experiments", "label", "parts", "pool", "rewards", "sandbox",
    "tools",
]  # fmt: skip
