"""Environments by name.

The options of an environment are the keyword arguments of its class. Unknown options and values of a wrong type are
refused when the recipe is read.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import ConfigDict, create_model

from rillflow.agents.options import read_options
from rillflow.config import resolve_object
from rillflow.config.base import Section
from rillflow.contracts import Environment
from rillflow.errors import ConfigError, did_you_mean

_HERE = "rillflow.agents.environments"


class Known(NamedTuple):
    """A shipped environment. `prompts` is the generator of its prompts, if it has one."""

    target: str
    about: str
    prompts: str | None
    needs: str = ""  # the argument of `pip install`


def _known(module: str, name: str, about: str, *, prompts: bool = True, package: str = "") -> Known:
    return Known(f"{_HERE}.{module}:{name}", about, f"{_HERE}.{module}:prompts" if prompts else None, package)


ENVIRONMENTS: dict[str, Known] = {
    "household": _known("household", "Household", "rooms, receptacles and things; six kinds of errands (as ALFWorld)"),
    "shop": _known("shop", "Shop", "find, choose and buy what was asked for (as WebShop)"),
    "tau": _known("tau", "Tau", "serve a customer with tools, a database and a policy (as tau-bench)"),
    "reasoning_gym": _known(
        "reasoning_gym", "ReasoningGym", "one question of a reasoning-gym dataset", package="rillflow[reasoning-gym]"
    ),
    "textworld_express": _known(
        "textworld_express", "TextWorldExpress", "eight text games in a Java process", package="rillflow[textworld]"
    ),
    "scienceworld": _known(
        "scienceworld", "ScienceWorld", "thirty school experiments in a Java process", package="rillflow[scienceworld]"
    ),
    "openenv": _known("openenv", "OpenEnv", "an environment behind an OpenEnv server", prompts=False),
    "alfworld": _known("alfworld", "AlfWorld", "ALFWorld's own games, from their folder", package="alfworld"),
    "webshop": _known("webshop", "WebShop", "WebShop's own products and goals, from their folder"),
}


class _Options(Section):
    """The options of a class, made from its signature; a default is not checked."""

    model_config = ConfigDict(arbitrary_types_allowed=True, validate_default=False)


class _AnyOptions(_Options):
    model_config = ConfigDict(extra="allow")


def environment_factory(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return a function that makes environments; `name` is a shipped one or module:Class."""
    made = resolve_object(target_of(name))
    if not callable(made):
        raise ConfigError(f"environment {name} is not a class", "give a class with async reset, step and close")
    given = checked_options(name, made, options)
    return lambda: made(**given)


def target_of(name: str) -> str:
    """Return the module:Class of a name."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name].target
    if ":" in name:
        return name
    raise ConfigError(
        f"there is no environment {name!r}",
        f"{did_you_mean(name, ENVIRONMENTS)}shipped: {', '.join(ENVIRONMENTS)}; "
        "your own is module:Class or file.py:Class",
    )


def checked_options(name: str, made: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options, converted to the types that the class declares."""
    parameters = inspect.signature(made).parameters.values()
    hints = typing.get_type_hints(made.__init__ if inspect.isclass(made) else made)
    fields: dict[str, Any] = {
        parameter.name: (hints.get(parameter.name, Any), ... if parameter.default is parameter.empty else None)
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    base: type[_Options] = _AnyOptions if free else _Options
    declared: type[_Options] = create_model("Options", __base__=base, **fields)
    checked = read_options(f"environment {name}", options, declared)
    return {option: getattr(checked, option) for option in options}
