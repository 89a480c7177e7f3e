"""Make docs/api.md from the docstrings of the public names and of the contracts (`scripts/reference_pages.py`)."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

import rillflow
import rillflow.contracts

SECTIONS: dict[str, tuple[str, ...]] = {
    "Running": ("run", "resume", "Run", "load_recipe", "Recipe"),
    "Workflows": ("Episode", "Role", "Said", "Toolbox", "Environment", "Observation"),
    "Rewards and tools": ("reward", "tool"),
    "Reading runs": ("trajectories", "Trajectories", "Trajectory"),
    "Errors": ("RillflowError", "ConfigError", "RunError", "WorkflowError", "RewardError", "ToolError"),
}

_WIDTH = 100  # of a signature in one line

_HEAD = """# Python interface

`import rillflow` gives the names below. They are typed, and each is loaded on first use: the import itself is cheap and
loads neither torch nor transformers. After them come the protocols of `rillflow.contracts`, which your own hooks,
engines, tools and environments implement. A test freezes both. [The recipe's keys](recipes.md), [the
errors](errors.md) and [the HTTP routes](routes.md) have their own pages.
"""


def page() -> str:
    """Return the page's text."""
    lines = [_HEAD, *(line for title, names in SECTIONS.items() for line in _section(title, names))]
    lines.append("## rillflow.contracts\n")
    shown = {name for names in SECTIONS.values() for name in names}
    for name, protocol in sorted(vars(rillflow.contracts).items()):
        if inspect.isclass(protocol) and protocol.__module__.startswith("rillflow.contracts.") and name not in shown:
            lines += [f"### {name}\n", _text(protocol), *_members(protocol)]
    return "\n".join(lines)


def _section(title: str, names: tuple[str, ...]) -> Iterator[str]:
    yield f"## {title}\n"
    for name in names:
        found = getattr(rillflow, name)
        yield f"### `rillflow.{name}`\n"
        if not inspect.isclass(found):
            yield _block(_signature(name, found), "python")
        yield _text(found)
        if inspect.isclass(found) and not issubclass(found, BaseModel):  # docs/recipes.md has the keys of a recipe
            yield from _members(found)


def _signature(name: str, function: Any) -> str:
    """Return the signature, with a line for each parameter if it is long."""
    signature = inspect.signature(function)
    parameters = [_parameter(one) for one in signature.parameters.values()]
    kinds = [one.kind for one in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"{name}({', '.join(parameters)}) -> {signature.return_annotation}"
    if len(line) <= _WIDTH:
        return line
    listed = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{name}(\n{listed}) -> {signature.return_annotation}"


def _parameter(one: inspect.Parameter) -> str:
    stars = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
    default = "" if one.default is one.empty else f" = {one.default!r}"
    return f"{stars}{one.name}: {one.annotation}{default}"


def _text(found: Any) -> str:
    """Return a docstring as Markdown: its example becomes a code block."""
    text, _, example = inspect.cleandoc(found.__doc__ or "").partition("\nExample:\n")
    example = example.replace("'''", '"""')  # an example inside a docstring cannot have these quotes
    return f"{text.strip()}\n" + (f"\n{_block(textwrap.dedent(example).strip(), 'python')}" if example else "")


def _members(kind: type) -> Iterator[str]:
    """Yield a line for each public property and method of the class itself."""
    rows = []
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            rows.append(f"- `{name}`{_summary(member.fget)}")
        elif inspect.isfunction(member):
            signature = inspect.signature(member)
            own = signature.replace(parameters=list(signature.parameters.values())[1:])
            written = re.sub(r"'([^']*)'", r"\1", str(own))
            rows.append(f"- `{name}{written}`{_summary(member)}")
    if rows:
        yield "\n".join(rows) + "\n"


def _summary(function: Any) -> str:
    text = " ".join(inspect.cleandoc(function.__doc__ or "").split())
    return f": {text}" if text else ""


def _block(code: str, language: str) -> str:
    return f"```{language}\n{code}\n```\n"
