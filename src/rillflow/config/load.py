"""From YAML and `key=value` overrides to a validated `Recipe`.

Recipes compose: `extends: other` starts from another recipe (a name or a path) and changes what the file says.
A top-level `trainer:` section is shared by every policy; `policies.NAME.trainer` wins over it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rillflow.config.base import Section
from rillflow.config.schema import Recipe
from rillflow.config.secrets import masked
from rillflow.errors import ConfigError, did_you_mean
from rillflow.storage import write_atomic

S = TypeVar("S", bound=Section)
# libyaml reads a recipe eight times as fast as Python does; every process of a run reads one.
_Loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_Dumper = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
FIT = "task"  # the key that only recipes of `rillflow fit` have
_PACKAGE = Path(__file__).resolve().parent.parent
_CODE = ("workflow", "reward", "generator", "function", "loss", "kind", "tools", "reasoning")
_HOOKS = ("filters", "curators", "sampler")
_REWARD = "reward"  # one name or function, or a list of them
_NODES = ("graph", "nodes")
# Passed to other programs unchanged.
_FOREIGN = ("arguments", "environment", "options", "chat_template_kwargs")


def _shipped_folder() -> Path:
    """Installed wheels carry the recipes inside the package; a checkout has them at its root."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent.parent / "recipes"


def recipes() -> dict[str, Path]:
    """The shipped recipes by name."""
    return {path.stem: path for path in sorted(_shipped_folder().glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the path of a recipe, given as a path to a YAML file or the name of a shipped recipe."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"the recipe file {name} does not exist", "check the path")
        return path
    shipped = recipes()
    if name not in shipped:
        raise ConfigError(
            f"unknown recipe {name!r}",
            f"{did_you_mean(name, shipped)}`rillflow recipes` lists the shipped ones; give a path ending in .yaml "
            "for your own",
        )
    return shipped[name]


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the validated recipe of a shipped name or of a YAML file, changed by `key=value` overrides.

    References to files become absolute, so that a run folder can be resumed anywhere. A wrong recipe is a ConfigError.

    Example:

        recipe = rillflow.load_recipe("quickstart", ["trainer.steps=3"])
        print(recipe.policies["agent"].trainer.steps)
    """
    return validate(read_raw(name, overrides))


def read_raw(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of a recipe of either kind, unchecked."""
    raw = _read(find_recipe(name), seen=())
    for override in overrides:
        _apply_override(raw, override)
    return raw


def read_resolved(path: Path) -> Recipe:
    """Return the recipe that `write_resolved` wrote, perhaps changed by hand since."""
    raw, run = parse(path), path.parent
    if FIT in raw:
        raise ConfigError(
            f"{run} is a run of supervised training",
            f"its finished model is in {run / 'model'}; `rillflow fit --resume {run}` goes on with it",
        )
    return validate(raw)


def validate(raw: dict[str, Any]) -> Recipe:
    if FIT in raw:
        raise ConfigError("the recipe has a `task`: it is for supervised training", "use `rillflow fit`")
    _share_trainer(raw)
    return validated(raw, Recipe)


def validated(raw: dict[str, Any], kind: type[S]) -> S:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, kind)), "`--help` and docs/recipes.md list the keys") from None


def write_resolved(recipe: Section, path: Path) -> None:
    """Write a recipe for its owner alone: it may hold passwords and keys."""
    text = yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)
    write_atomic(path, text.encode(), private=True)


# ---------------------------------------------------------------- reading


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path} extends itself", "remove one `extends` of the circle")
    raw = parse(path)
    base_name = raw.pop("extends", None)
    _anchor(raw, path.parent)
    if "environment" in raw:  # elsewhere this key is for variables, here it names code
        raw["environment"] = _anchored_hook(raw["environment"], path.parent)
    if base_name is None:
        return raw
    beside = path.parent / str(base_name)
    base = _read(beside if beside.is_file() else find_recipe(str(base_name)), (*seen, path))
    return _merged(base, raw)


def parse(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_text(), _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", "fix the line it names") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "check its rights; a recipe is UTF-8 text") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must be a mapping of keys to values", "see docs/recipes.md")
    return raw


def _anchor(raw: dict[str, Any], folder: Path) -> None:
    """Make references to files absolute: `play.py:play` becomes `/where/play.py:play`."""
    for key, value in raw.items():
        if key in _FOREIGN:
            continue
        if key in _HOOKS or (key == _REWARD and isinstance(value, list)):
            several = isinstance(value, list)
            raw[key] = [_anchored_hook(hook, folder) for hook in value] if several else _anchored_hook(value, folder)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    _anchor(item, folder)
            if key in (*_NODES, "tools"):
                raw[key] = [_anchored("function", item, folder) if isinstance(item, str) else item for item in value]
        elif isinstance(value, dict):
            _anchor(value, folder)
        elif isinstance(value, str):
            raw[key] = _anchored(key, value, folder)


def _anchored_hook(hook: Any, folder: Path) -> Any:
    """A name, a mapping of the name to options, or what `write_resolved` made of it."""
    if isinstance(hook, str):
        return _anchored("workflow", hook, folder)
    if isinstance(hook, dict) and isinstance(hook.get("name"), str):
        return hook | {"name": _anchored("workflow", hook["name"], folder)}
    if isinstance(hook, dict):
        return {_anchored("workflow", str(name), folder): options for name, options in hook.items()}
    return hook


def _anchored(key: str, value: str, folder: Path) -> str:
    """Names of modules, of the shipped policy and of hub models stay as they are, whatever folder has the same name."""
    if key in _CODE:
        file, colon, name = value.rpartition(":")
        return f"{(folder / file).resolve()}:{name}" if colon and (folder / file).is_file() else value
    if key in ("command", "run"):
        return _anchored_command(value, folder)
    if key not in ("path", "chat_template", "model", "reference", "dataset", "folder"):
        return value
    path = folder / Path(value).expanduser()
    if key in ("path", "chat_template") or (value != "tiny" and path.is_dir()):
        return str(path.resolve())
    return value


def _anchored_command(command: str, folder: Path) -> str:
    """`python my_agent.py` runs in a folder of its own: words that are files beside the recipe become absolute.

    Links stay: the interpreter of a virtual environment is a link, and what it leads to knows none of its packages.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return command  # refused, with the reason, when the command is looked at
    # Not `Path.is_file`, which raises where a word, a script say, is longer than any file's name.
    files = {word: os.path.abspath(folder / word) for word in words if os.path.isfile(folder / word)}
    return shlex.join(files.get(word, word) for word in words) if files else command


def _merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _share_trainer(raw: dict[str, Any]) -> None:
    shared = raw.pop("trainer", None)
    if not isinstance(shared, dict | None):
        raise ConfigError(f"trainer must be a section of keys, not {shared!r:.80}", "see docs/recipes.md")
    policies = raw.get("policies")
    if shared is None or not isinstance(policies, dict):
        return
    for policy in policies.values():
        own = policy.get("trainer") or {} if isinstance(policy, dict) else None
        if isinstance(own, dict):  # anything else is refused by the schema, which names it
            policy["trainer"] = _merged(shared, own)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not of the form key=value", "for example trainer.lr=1e-4 seed=3")
    where: Any = raw
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents):
        where = _entered(where, parent, key)
        if not isinstance(where, dict | list):
            raise ConfigError(f"{key}: {'.'.join(parents[: depth + 1])} is a value, not a section", "check the key")
    # On the command line a relative path starts where the user is. An item of a list is what the list says it is.
    listed = isinstance(where, list)
    change = {parents[-1]: [_scalar(text)]} if listed else {last: _scalar(text)}
    if not any(parent in _FOREIGN for parent in parents):
        _anchor(change, Path.cwd())
    if listed:
        (where[_index(where, last, key)],) = change[parents[-1]]
    else:
        where |= change


def _entered(where: dict[str, Any] | list[Any], part: str, key: str) -> Any:
    """Return the part of `where` that `part` names; a missing or empty section is created."""
    if isinstance(where, list):
        return where[_index(where, part, key)]
    if where.get(part) is None:
        where[part] = {}
    return where[part]


def _index(where: list[Any], part: str, key: str) -> int:
    if not part.isdecimal() or int(part) >= len(where):
        raise ConfigError(
            f"{key}: {part} is not an item of a list of {len(where)}",
            "name one by its number from 0, as in data.prompts.0.limit=100, or give the whole list",
        )
    return int(part)


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is not a valid value: {error}", "quote it") from None
    if isinstance(value, str) and value == text.strip():  # a quoted value is text
        try:
            return float(value)  # YAML 1.1 reads 1e-4 as a string
        except ValueError:
            return value
    return value


# ---------------------------------------------------------------- explaining


def _explain(error: ValidationError, kind: type[BaseModel]) -> Iterator[str]:
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            valid = _fields_at(item["loc"][:-1], kind)
            yield f"unknown key {where}; {did_you_mean(str(item['loc'][-1]), valid)}valid: {', '.join(valid)}"
        elif item["type"] == "missing":
            yield f"{where} is missing"
        else:
            what = item["msg"].removeprefix("Value error, ")
            shown = masked(item.get("input"), str(item["loc"][-1]) if item["loc"] else "")
            yield f"{where}: {what} (got {shown!r:.80})" if where else what


def _fields_at(location: tuple[int | str, ...], kind: type[BaseModel]) -> list[str]:
    """The valid keys of the section at `location`."""
    model = kind
    for part in location:
        field = model.model_fields.get(str(part))
        inner = _section_of(field.annotation) if field else None
        if inner is not None:
            model = inner
    names = list(model.model_fields)
    return [*names, "trainer"] if model is Recipe else names


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, perhaps in a list or where there may be none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section_of(inner)) is not None), None)


# ---------------------------------------------------------------- references to code


def resolve_object(reference: str) -> Any:
    """`package.module:name` or `/path/file.py:name`. A ConfigError says what could not be found."""
    target, colon, name = reference.rpartition(":")
    if not colon:
        raise ConfigError(f"{reference!r} must look like module:name or file.py:name", "for example play.py:play")
    module = _load_file(Path(target)) if target.endswith(".py") else _load_module(target)
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{target} has no {name!r}", f"{did_you_mean(name, names)}check the recipe")
    return getattr(module, name)


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"cannot import {name}: {error}", "install it, or give file.py:name") from error


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", "paths in a recipe are relative to the recipe")
    spec = importlib.util.spec_from_file_location(f"rillflow_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        with _neighbours_of(path):
            spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"cannot load {path}: {type(error).__name__}: {error}", "fix the file") from error
    return module


@contextmanager
def _neighbours_of(path: Path) -> Iterator[None]:
    """Let a file import the modules beside it. They come first while it is loaded, as for a script, and last from then
    on: a file of the user hides no installed package from other code that imports it later."""
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the file may have changed the path
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
