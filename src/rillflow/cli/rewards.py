"""`rillflow rewards`: the shipped rewards that a recipe can name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rillflow.cli.app import app, clear_errors

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


@app.command(rich_help_panel="What agents use, and how good they are")
def rewards(
    name: Annotated[str | None, typer.Argument(help="One of them, with its options", show_default=False)] = None,
) -> None:
    """List the rewards that a recipe can name, or the options of one."""
    from rillflow.agents.rewards.registry import REWARDS, reward_class

    console = Console()
    with clear_errors():
        if name is not None:
            kind = reward_class(name)
            console.print(_first_line(kind), soft_wrap=True, highlight=False)
            console.print(_options(kind.model_fields))
            return
        table = Table("reward", "what it gives", "options")
        for each, kind in REWARDS.items():
            table.add_row(each, _first_line(kind), ", ".join(kind.model_fields))
        console.print(table)
        console.print("or module:function and file.py:function, `def reward(payload, answer) -> float`", style="dim")


def _first_line(kind: type[Any]) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _options(fields: dict[str, FieldInfo]) -> Table:
    table = Table("option", "default", "meaning")
    for name, field in fields.items():
        default = "needed" if field.is_required() else "" if field.default is None else str(field.default)
        table.add_row(name, default, field.description or "")
    return table
