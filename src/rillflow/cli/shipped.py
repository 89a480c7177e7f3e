"""`rillflow recipes`: what is shipped, and one recipe whole."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rillflow.config import recipes
from rillflow.config.load import FIT, find_recipe, read_raw


def list_recipes() -> None:
    """Print a line for each recipe, cut to the width of the terminal."""
    table = Table(
        Column("recipe", no_wrap=True),
        Column("with", no_wrap=True),
        Column("what it does", no_wrap=True, overflow="ellipsis", ratio=1),
        box=None,
        padding=(0, 1, 0, 0),
        expand=True,
    )
    for name in recipes():
        raw = read_raw(name)
        table.add_row(name, command_of(raw), _description(raw))
    console = Console()
    console.print(table)
    console.print("`rillflow recipes NAME` shows one whole; `rillflow run NAME` or `rillflow fit NAME` starts it")


def show_shipped(name: str) -> None:
    """Print all of one recipe: what it does, how it is started, and its file as it is."""
    path, raw = find_recipe(name), read_raw(name)
    console = Console()
    console.print(Text.assemble((name, "bold"), f"  {_description(raw)}"))
    console.print(f"start it with `rillflow {command_of(raw)} {name}`", highlight=False, soft_wrap=True)
    console.print(f"{path}:", highlight=False, soft_wrap=True)
    console.print()
    print(path.read_text(), end="")


def command_of(raw: dict[str, object]) -> str:
    return "fit" if FIT in raw else "run"


def _description(raw: dict[str, object]) -> str:
    return " ".join(str(raw.get("description", "")).split())
