"""The contract of a stage, and how one is made from its section of the recipe.

A class of your own is named by its path. It is made once in each worker, with the recipe, the name of its policy and
the options of its section, and then gets the samples of a few groups at a time:

    class Novelty:
        gives = ("novelty_R",)

        def __init__(self, recipe, policy, *, scale: float = 1.0): …

        def columns(self, data):
            return {"novelty_R": …}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rillflow.config import Recipe, StageConfig, resolve_object
from rillflow.errors import ConfigError, did_you_mean
from rillflow.stages.shipped import ReferenceLogprobs, RewardScores
from rillflow.trainer.batches import Databuffer, columns_of_stage, staged_columns
from rillflow.trainer.graph.builtin import chain_of

if TYPE_CHECKING:
    from rillflow.trainer.batches import Column


class Stage(Protocol):
    """Makes columns for samples. It is called from one thread; an exception ends its worker."""

    def columns(self, data: Databuffer) -> Mapping[str, Column]:
        """Return the columns that its class declares as `gives`: a value per token (`_N`) or per sample (`_R`)."""


SHIPPED: dict[str, Callable[..., Stage]] = {"reference": ReferenceLogprobs, "reward_model": RewardScores}


def check_stages(recipe: Recipe) -> None:
    """Raise ConfigError if a stage cannot work, or nothing would read its columns. Loads no model."""
    for settings in recipe.policies.values():
        for name, config in settings.stages.items():
            _check_options(name, config)
        chain_of(settings.trainer, recipe.mode, staged=staged_columns(settings.stages))


def build_stage(recipe: Recipe, policy: str, name: str) -> Stage:
    config = recipe.policies[policy].stages[name]
    _check_options(name, config)
    return _Checked(name, columns_of_stage(name, config), _class_of(config)(recipe, policy, **_options(config)))


def _class_of(config: StageConfig) -> Callable[..., Stage]:
    found: Callable[..., Stage] = SHIPPED.get(config.kind) or resolve_object(config.kind)
    return found


def _options(config: StageConfig) -> dict[str, Any]:
    return config.options | ({} if config.model is None else {"model": config.model})


def _check_options(name: str, config: StageConfig) -> None:
    """Raise ConfigError if an option is not a parameter of the class, or a required one is missing."""
    columns_of_stage(name, config)  # refuses an unknown kind
    parameters = list(inspect.signature(_class_of(config)).parameters.values())[2:]
    valid = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    given = _options(config)
    for option in given if len(valid) == len(parameters) else ():
        if option not in valid:
            listed = f"valid: {', '.join(valid)}" if valid else "it takes none"
            raise ConfigError(f"stage {name} has no option {option!r}", f"{did_you_mean(option, valid)}{listed}")
    for each in parameters:
        if each.name in valid and each.default is each.empty and each.name not in given:
            raise ConfigError(f"stage {name} needs `{each.name}`", f"give it under stages.{name}; see docs/stages.md")


class _Checked:
    """A stage whose columns are what it has declared, of the right length, and finite."""

    def __init__(self, name: str, gives: tuple[str, ...], stage: Stage) -> None:
        self._name = name
        self._gives = gives
        self._stage = stage

    def columns(self, data: Databuffer) -> Mapping[str, Column]:
        made = {name: np.ascontiguousarray(column, "<f4") for name, column in self._stage.columns(data).items()}
        if set(made) != set(self._gives):
            raise ConfigError(
                f"stage {self._name} made {', '.join(made) or 'nothing'}, and declares {', '.join(self._gives)}",
                "return a dict with exactly what `gives` names",
            )
        data.adding(made)  # refuses another length
        for name, column in made.items():
            if not np.isfinite(column).all():
                raise ConfigError(
                    f"stage {self._name} made {name} with a value that is not finite", "look at its model"
                )
        return made
