"""From what a recipe says of a hook to the hook itself; whatever is wrong is a ConfigError that names it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import ValidationError

from rillflow.config import HookConfig, resolve_object
from rillflow.dataflow.hooks.options import nearest
from rillflow.errors import ConfigError, RillflowError

Kind = Literal["curator", "filter", "sampler"]
METHODS: dict[Kind, tuple[str, ...]] = {
    "curator": ("admit", "observe", "on_version", "state", "restore"),
    "filter": ("keep",),
    "sampler": ("pick",),
}


def build(kind: Kind, config: HookConfig, known: Mapping[str, type[Any]]) -> Any:
    """An instance of a registered class, or of `module:Class`, made with the recipe's options."""
    made_of = _class_of(kind, config.name, known)
    what = f"{kind} {short_name(config.name)}"
    _check_names(what, made_of, config.options)
    try:
        return made_of(**config.options)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(what, error)), f"fix the options of {what} in the recipe") from None
    except RillflowError:
        raise
    except Exception as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} could not be made: {said}", f"fix the options of {what} in the recipe") from error


def short_name(name: str) -> str:
    """What a hook is called in counts and saved state: a file without its folder, so that a run may be moved."""
    target, colon, cls = name.rpartition(":")
    return f"{target.rpartition('/')[2]}{colon}{cls}"


def _class_of(kind: Kind, name: str, known: Mapping[str, type[Any]]) -> type[Any]:
    if name in known:
        return known[name]
    if ":" not in name:
        raise ConfigError(
            f"there is no {kind} {name!r}", f"{nearest(name, known)}known: {', '.join(known)}; or module:Class"
        )
    found = resolve_object(name)
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


def _check_names(what: str, made_of: type[Any], given: Mapping[str, Any]) -> None:
    """Every option is one that the constructor takes, and none that it needs is missing."""
    parameters = inspect.signature(made_of).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    valid = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    for name in given:
        if name not in valid:
            listed = f"valid: {', '.join(valid)}" if valid else "it takes none"
            raise ConfigError(f"{what} has no option {name!r}", f"{nearest(name, valid)}{listed}")
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
