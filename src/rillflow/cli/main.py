"""The `rillflow` command."""

from __future__ import annotations

from rillflow.cli import evaluate, experiments, label, parts, pool, rewards, tools
from rillflow.cli.app import app

__all__ = ["app", "evaluate", "experiments", "label", "parts", "pool", "rewards", "tools"]
