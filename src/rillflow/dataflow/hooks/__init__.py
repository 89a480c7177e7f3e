"""The data algorithms of a run: curators, filters and a sampler, by name or as `module:Class`, each with its options.

To add one, write a class and add its line to a table. `build` makes the hooks that a recipe names; whatever is wrong
is a ConfigError that names it. The ledger calls `running.Hooks`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import ValidationError

from rillflow.config import HookConfig, resolve_object
from rillflow.contracts import Curator, Filter, Sampler
from rillflow.dataflow.hooks.curators import Curriculum, Greso, Mixing, Solved
from rillflow.dataflow.hooks.filters import FunctionFilter, LengthBand, Overlong, Staleness, ZeroVariance
from rillflow.dataflow.hooks.samplers import EarliestDeadline, Fifo, Replay
from rillflow.errors import ConfigError, RillflowError, did_you_mean

# The names that a recipe may use for the data algorithms that come with Rillflow.
CURATORS: dict[str, type[Curator]] = {
    "curriculum": Curriculum,
    "greso": Greso,
    "mixing": Mixing,
    "solved": Solved,
}
FILTERS: dict[str, type[Filter]] = {
    "length_band": LengthBand,
    "overlong": Overlong,
    "staleness": Staleness,
    "zero_advantage": ZeroVariance,
    "zero_variance": ZeroVariance,
}
SAMPLERS: dict[str, type[Sampler]] = {
    "earliest_deadline": EarliestDeadline,
    "fifo": Fifo,
    "replay": Replay,
}

Kind = Literal["curator", "filter", "sampler"]
METHODS: dict[Kind, tuple[str, ...]] = {
    "curator": ("admit", "observe", "on_version", "state", "restore"),
    "filter": ("keep",),
    "sampler": ("pick",),
}


def build(kind: Kind, config: HookConfig, known: Mapping[str, type[Any]]) -> Any:
    """Return an instance of a registered class, of `module:Class`, or, for a filter, around `module:function`."""
    found = _find(kind, config.name, known)
    what = f"{kind} {short_name(config.name)}"
    if not inspect.isclass(found):
        _check_names(what, list(inspect.signature(found).parameters.values())[1:], config.options)
        return FunctionFilter(found, config.options)
    _check_names(what, list(inspect.signature(found).parameters.values()), config.options)
    try:
        return found(**config.options)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(what, error)), f"fix the options of {what} in the recipe") from None
    except RillflowError:
        raise
    except Exception as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} could not be made: {said}", f"fix the options of {what} in the recipe") from error


def short_name(name: str) -> str:
    """Return what a hook is called in counts and saved state: a file without its folder, so that a run may be moved."""
    target, colon, cls = name.rpartition(":")
    return f"{target.rpartition('/')[2]}{colon}{cls}"


def _find(kind: Kind, name: str, known: Mapping[str, type[Any]]) -> Callable[..., Any]:
    """Return the class, or the function of a filter, that `name` stands for."""
    if name in known:
        return known[name]
    if (kind, name) == ("filter", "expression"):
        raise ConfigError(
            "the filter `expression` was removed",
            "write its condition as a function in a file beside the recipe, `def keep(group): return (CONDITION) or "
            '"REASON"`, and list the filter as `mine.py:keep`; the values are group.rewards, group.lengths, '
            "group.truncated, group.staleness and group.prompt.payload",
        )
    if ":" not in name:
        either = "module:Class or module:function" if kind == "filter" else "module:Class"
        raise ConfigError(
            f"there is no {kind} {name!r}", f"{did_you_mean(name, known)}known: {', '.join(known)}; or {either}"
        )
    found = resolve_object(name)
    if kind == "filter" and inspect.isfunction(found):
        return _checked_function(name, found)
    if not inspect.isclass(found):
        raise ConfigError(
            f"{name} is no class but {found!r:.80}", f"name a class with {', '.join(METHODS[kind])} as {kind}"
        )
    lacking = [method for method in METHODS[kind] if not callable(getattr(found, method, None))]
    if lacking:
        raise ConfigError(
            f"{name} cannot be a {kind}: it has no {', '.join(lacking)}",
            f"a {kind} has {', '.join(METHODS[kind])}; see docs/data_algorithms.md",
        )
    return found


def _checked_function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    hint = "a filter is `def keep(group)`, which returns True, False or the reason of the drop"
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name} is a coroutine function, which cannot be a filter", hint)
    if not inspect.signature(function).parameters:
        raise ConfigError(f"{name} takes no argument, so it cannot be a filter", hint)
    return function


def _check_names(what: str, parameters: list[inspect.Parameter], given: Mapping[str, Any]) -> None:
    """Check that every option is one of the parameters, and that none without a default is missing."""
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    valid = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    for name in given:
        if name not in valid:
            listed = f"valid: {', '.join(valid)}" if valid else "it takes none"
            raise ConfigError(f"{what} has no option {name!r}", f"{did_you_mean(name, valid)}{listed}")
    for each in parameters:
        if each.name in valid and each.default is each.empty and each.name not in given:
            raise ConfigError(
                f"{what} needs the option {each.name!r}", f"write {{{what.partition(' ')[2]}: {{{each.name}: …}}}}"
            )


def _explain(what: str, error: ValidationError) -> Iterator[str]:
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        wrong = item["msg"].removeprefix("Value error, ").replace("Input should", "it should")
        yield f"{what}, option {where}: {wrong} (got {item.get('input')!r:.80})"
