"""Write the generated pages of the documentation: `python -m scripts.reference_pages`.

Each page is made from the code or the results that it describes. A test fails while a committed page differs from it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from rillflow import errors
from rillflow.cli.main import app
from scripts import api_page, recipes_page, results_pages, routes_page

DOCS = Path(__file__).resolve().parents[1] / "docs"

_CLI = """# Commands

Every command with its arguments and options, as `rillflow COMMAND --help` prints them. RUN is a run folder, such as
`runs/quickstart-…`; RECIPE is the name of a shipped recipe or the path of a YAML file. Exit codes: 0 on success, 1 for
a bad result (a failed episode, an audit that does not balance), 2 for an error that the command explains, 130 after
Ctrl-C.
"""

_ERRORS = """# Errors

Every error that Rillflow raises on purpose belongs to one tree, `rillflow.errors`. It has a message, which says what
happened, and usually a hint, which says what to do in this case. If the hint is empty, the commands print the advice
of this table instead. The status is the HTTP status under which the error crosses processes.

[When something goes wrong](troubleshooting.md) starts from symptoms instead.
"""


def cli() -> str:
    """Return the page of commands."""
    group: Any = get_command(app)
    return "\n".join(
        [_CLI, *(line for name in sorted(group.commands) for line in _command(name, group.commands[name]))]
    )


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and "--help" not in one.opts]
    usage = ["rillflow", name, *(["[OPTIONS]"] if options else []), *(_argument(one) for one in arguments)]
    yield f"## {name}\n"
    yield f"`{' '.join(usage)}`\n"
    yield f"{inspect.cleandoc(command.help)}\n"
    if command.params:
        yield "| argument or option | meaning | default |\n|---|---|---|"
    for one in (*arguments, *options):
        names = _argument(one) if one in arguments else ", ".join((*one.opts, *one.secondary_opts))
        yield f"| `{names}` | {_cell(one.help or '')} | {_cell(_default(one))} |"
    yield ""


def _argument(argument: Any) -> str:
    name = argument.metavar or str(argument.name).upper()
    if argument.nargs == -1:
        name += " …"
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    value = parameter.default
    return "" if value in (None, False, ()) or callable(value) else f"`{value}`"


def error_tree() -> str:
    """Return the page of errors."""
    meanings = dict(re.findall(r"── (\w+) +(.+)", errors.__doc__ or ""))
    rows = [
        f"| {'&emsp;' * (len(kind.__mro__) - 5)}`{name}` | {kind.status} | {meanings[name]} | {_cell(kind.advice)} |"
        for name, kind in errors.KINDS.items()
        if kind is not errors.RillflowError
    ]
    return "\n".join([_ERRORS, "| error | status | meaning | what to do |\n|---|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


PAGES: dict[str, Callable[[], str]] = {
    "recipes.md": recipes_page.reference,
    "routes.md": routes_page.page,
    "cli.md": cli,
    "errors.md": error_tree,
    "api.md": api_page.page,
    "results.md": results_pages.recipe_results,
    "asynchrony.md": results_pages.asynchrony,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
