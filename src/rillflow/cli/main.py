"""The `rillflow` command."""

from __future__ import annotations

from rillflow.cli import environments, evaluate, experiments, label, parts, pool, rewards, sandbox, tools
from rillflow.cli.app import app

__all__ = ["app", "environments", "evaluate", "experiments", "label", "parts", "pool", "rewards", "sandbox", "tools"]
