"""The `rillflow` command."""

from __future__ import annotations

from rillflow.cli import experiments, parts, pool, rewards
from rillflow.cli.app import app

__all__ = ["app", "experiments", "parts", "pool", "rewards"]
