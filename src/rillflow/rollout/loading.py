"""The user's workflow and reward function, by the names that a recipe gives them.

`rillflow run` checks both before it starts anything, so importing this module loads neither torch nor a client.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from rillflow.agents.command import words_of
from rillflow.agents.environments.registry import environment_factory
from rillflow.agents.rewards.registry import load_group_reward
from rillflow.agents.rewards.registry import load_reward as load_named_reward
from rillflow.config import Recipe, resolve_object
from rillflow.errors import ConfigError

if TYPE_CHECKING:
    from rillflow.rollout.episode import Reward, Workflow


def load_reward(recipe: Recipe) -> Reward | None:
    return None if recipe.reward is None else load_named_reward(recipe.reward)


def refuse_outside(recipe: Recipe) -> None:
    """Fail where only a run can be played, because its agents connect to it."""
    if recipe.outside:
        raise ConfigError(
            "the recipe's agents come from outside: nobody here can play",
            "give a workflow: --workflow of `rillflow eval`, `outside=false workflow=…` of `rillflow try`",
        )


def check_players(recipe: Recipe) -> str | None:
    """Fail where a look can tell that no episode could be played. A workflow's module may have a `check_recipe` that
    raises a ConfigError for what the workflow cannot work with, and returns a warning, which this returns, or None."""
    warning: str | None = None
    if recipe.workflow is not None:
        check_recipe = getattr(inspect.getmodule(load_workflow(recipe)), "check_recipe", None)
        if check_recipe is not None:
            warning = check_recipe(recipe)
    if recipe.command is not None:
        words_of(recipe.command)
    if recipe.environment is not None:
        environment_factory(recipe.environment.name, recipe.environment.options)
    load_reward(recipe)
    if load_group_reward(recipe.reward) is not None:
        for policy in recipe.policies:
            if recipe.step_rewards(policy) in ("own", "to_go"):
                raise ConfigError(
                    f"trainer.step_rewards={recipe.step_rewards(policy)} reads rewards of single answers, and `reward` "
                    "compares whole episodes of a group",
                    "leave trainer.step_rewards out, or take the reward that names `group` out of the recipe",
                )
    return warning


def load_workflow(recipe: Recipe) -> Workflow:
    workflow: Workflow = resolve_object(recipe.workflow or "")
    if not inspect.iscoroutinefunction(workflow):
        raise ConfigError(f"workflow {recipe.workflow} is not an async function", "write `async def play(episode):`")
    return workflow
