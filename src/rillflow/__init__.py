"""Rillflow: dataflow-oriented reinforcement learning for agentic language models.

The names below are what users build on. They are loaded on first use, so `import rillflow` is cheap and imports neither
torch nor transformers. `docs/api.md` describes them.

    import rillflow

    run = rillflow.run("quickstart", "trainer.steps=3")
    print(run.summary["steps"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rillflow import errors
    from rillflow.agents.rewards.base import reward
    from rillflow.agents.tools.functions import tool
    from rillflow.api import Run, resume, run, trajectories
    from rillflow.config import Recipe, load_recipe
    from rillflow.contracts import Environment, Episode, Role, Toolbox
    from rillflow.errors import ConfigError, RewardError, RillflowError, RunError, ToolError, WorkflowError
    from rillflow.storage.trajectories import Trajectories
    from rillflow.storage.trajectory_format import Trajectory
    from rillflow.types import Observation, Said

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "Environment",
    "Episode",
    "Observation",
    "Recipe",
    "RewardError",
    "RillflowError",
    "Role",
    "Run",
    "RunError",
    "Said",
    "ToolError",
    "Toolbox",
    "Trajectories",
    "Trajectory",
    "WorkflowError",
    "__version__",
    "errors",
    "load_recipe",
    "resume",
    "reward",
    "run",
    "tool",
    "trajectories",
]
# The module of each name. `errors` is a module itself.
_MODULES = {
    "rillflow.agents.rewards.base": ("reward",),
    "rillflow.agents.tools.functions": ("tool",),
    "rillflow.api": ("Run", "resume", "run", "trajectories"),
    "rillflow.config": ("Recipe", "load_recipe"),
    "rillflow.contracts": ("Environment", "Episode", "Role", "Toolbox"),
    "rillflow.errors": ("ConfigError", "RewardError", "RillflowError", "RunError", "ToolError", "WorkflowError"),
    "rillflow.storage.trajectories": ("Trajectories",),
    "rillflow.storage.trajectory_format": ("Trajectory",),
    "rillflow.types": ("Observation", "Said"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # type checkers read the imports above, and report names that do not exist

    def __getattr__(name: str) -> object:
        if name == "errors":
            return importlib.import_module("rillflow.errors")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
