"""What a recipe puts around its workflow: tools, environments, roles and options. One of it serves a whole node."""

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
    """`environment` makes one for an episode; None where the recipe names none. `errors` hears what its code raises."""

    roles: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: Toolbox = field(default_factory=OpenToolbox)
    environment: Callable[[], Environment] | None = None
    errors: UserErrors = field(default_factory=UserErrors)

    def new_environment(self) -> Environment:
        if self.environment is None:
            raise ConfigError("the workflow wants an environment and the recipe names none", "give `environment:`")
        return self.environment()

    def policy_of(self, role: str, policies: tuple[str, ...]) -> str:
        """The recipe's word; else the policy that is called like the role; else the first."""
        return self.roles.get(role) or (role if role in policies else policies[0])


async def open_surroundings(recipe: Recipe) -> tuple[Surroundings, OpenToolbox]:
    """The toolbox is the caller's to close; it is opened last, so an error leaves nothing open."""
    hook = recipe.environment
    made = None if hook is None else environment_factory(hook.name, hook.options)
    errors = UserErrors()
    toolbox = await open_toolbox(recipe.tools, errors)
    return Surroundings(recipe.roles, recipe.options, toolbox, made, errors), toolbox
