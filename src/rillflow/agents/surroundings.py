"""The tools, environments, roles and options of a recipe, which all episodes of a node share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rillflow.agents.environments.registry import environment_factory
from rillflow.agents.tools.toolbox import OpenToolbox, open_toolbox
from rillflow.config import Recipe
from rillflow.config.tracebacks import UserErrors
from rillflow.contracts import Environment, Toolbox
from rillflow.errors import ConfigError


@dataclass(frozen=True)
class Surroundings:
    """What a recipe gives its workflow. `environment` makes one for each episode; `errors` collects user errors."""

    roles: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: Toolbox = field(default_factory=OpenToolbox)
    environment: Callable[[], Environment] | None = None
    errors: UserErrors = field(default_factory=UserErrors)

    def new_environment(self) -> Environment:
        """Return the environment of one episode."""
        if self.environment is None:
            raise ConfigError("the workflow uses an environment and the recipe names none", "give `environment:`")
        return self.environment()

    def policy_of(self, role: str, policies: tuple[str, ...]) -> str:
        """Return the policy of a role: the recipe's choice, or the policy of the same name, or the first policy."""
        return self.roles.get(role) or (role if role in policies else policies[0])


async def open_surroundings(recipe: Recipe) -> tuple[Surroundings, OpenToolbox]:
    """Return the surroundings and the toolbox, which the caller closes. An error leaves nothing open."""
    hook = recipe.environment
    made = None if hook is None else environment_factory(hook.name, hook.options)
    errors = UserErrors()
    toolbox = await open_toolbox(recipe.tools, errors)
    return Surroundings(recipe.roles, recipe.options, toolbox, made, errors), toolbox
