"""The `rillflow` command."""

from __future__ import annotations

from rillflow.cli import agents, evaluate, experiments, parts, watching
from rillflow.cli.app import app

__all__ = ["agents", "app", "evaluate", "experiments", "parts", "watching"]
