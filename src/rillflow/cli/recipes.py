"""`rillflow recipes` lists the shipped recipes or prints one; `rillflow graph` shows the nodes of a training step.

Only `rillflow graph` imports the trainer, which takes long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rillflow.config import recipes
from rillflow.config.load import FIT, find_recipe, read_raw, validate, validated
from rillflow.config.supervised import FitRecipe
from rillflow.errors import ConfigError
from rillflow.storage import write_atomic

if TYPE_CHECKING:
    from rillflow.trainer.graph.planner import Chain

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


_COLOURS = {"actor": "blue", "critic": "yellow", "reference": "magenta", "reward": "green"}


def show_graph(name: str, overrides: Sequence[str], policy: str | None, drawing: Path | None) -> None:
    from rillflow.trainer.graph.drawing import svg

    title, chain = find_chain(name, overrides, policy)
    console = Console()
    console.print(Text(title, style="bold"))
    console.print(_rich(chain))
    if drawing is not None:
        write_atomic(drawing.resolve(), svg(chain).encode())
        console.print(f"drawn in {drawing}", highlight=False, soft_wrap=True)


def find_chain(name: str, overrides: Sequence[str], policy: str | None) -> tuple[str, Chain]:
    """Return a title and the chain of nodes of a recipe for `run` or `fit`."""
    from rillflow.trainer.batches import staged_columns
    from rillflow.trainer.graph.builtin import chain_of
    from rillflow.trainer.graph.planner import plan

    raw = read_raw(name, overrides)
    if FIT in raw:
        if policy is not None:
            raise ConfigError(f"{name} trains one model, not policies", "leave --policy out")
        # Only here: loading it registers functions that `rillflow run` does not know.
        from rillflow.trainer.supervised.functions import graph_of

        fit = validated(raw, FitRecipe)
        return f"A step of {fit.name}: {fit.task}", plan(graph_of(fit), ranks=fit.trainer.ranks)
    recipe = validate(raw)
    whose = policy or recipe.policy
    if whose not in recipe.policies:
        raise ConfigError(f"the recipe has no policy {whose!r}", f"it has: {', '.join(recipe.policies)}")
    trainer, staged = recipe.policies[whose].trainer, staged_columns(recipe.policies[whose].stages)
    what = "a graph of its own" if trainer.graph is not None else trainer.algorithm
    return f"A step of {whose}: {what}, {recipe.mode}", chain_of(trainer, recipe.mode, staged=staged)


def _rich(chain: Chain) -> Table:
    """Return the table of a chain. It fits 80 characters, with long cells on several lines."""
    from rillflow.trainer.graph.drawing import HEADER, table

    shown = Table("", "node", "role and kind", *HEADER[3:], box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for number, (node, role, kind, *rest) in enumerate(table(chain), 1):
        shown.add_row(str(number), Text(node, style=f"bold {_COLOURS[role]}"), f"{role} {kind}", *rest)
    shown.columns[3].min_width = 14
    for column in shown.columns[:3]:
        column.no_wrap = True
    return shown
