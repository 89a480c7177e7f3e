"""`rillflow recipes`: list the shipped recipes, or print one whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rillflow.config import recipes
from rillflow.config.load import FIT, find_recipe, read_raw

# The groups in which recipes are listed, each with how it is started; a recipe is in the first that takes its name.
_BASICS = "quickstart|stockroom|ppo|pipeline_|vllm_tiny|sglang_tiny"
GROUPS: dict[str, Callable[[str, dict[str, object]], bool]] = {
    "rillflow fit: supervised training, and what other recipes start from": lambda name, raw: command_of(raw) == "fit",
    "rillflow run: on one GPU": lambda name, raw: name.endswith("_gpu"),
    "rillflow run: the quickstart and its variants, on a CPU": lambda name, raw: bool(re.match(_BASICS, name)),
    "rillflow run: agents, tools, several policies, on a CPU": lambda name, raw: True,
}


def list_recipes() -> None:
    """Print a line for each recipe, cut to the width of the terminal, in groups of a screen each."""
    found: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS}
    for name in recipes():
        raw = read_raw(name)
        title = next(title for title, takes in GROUPS.items() if takes(name, raw))
        found[title].append((name, _description(raw)))
    console = Console()
    for title in reversed(found):
        console.print(Text(title, "bold"))
        console.print(_listed(found[title]))
        console.print()
    console.print("`rillflow recipes NAME` shows one whole")


def _listed(rows: Sequence[tuple[str, str]]) -> Table:
    shown = [Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)]
    table = Table(*shown, box=None, padding=(0, 1, 0, 0), expand=True, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def show_shipped(name: str) -> None:
    """Print one recipe: its description, the command that starts it, and its file."""
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
