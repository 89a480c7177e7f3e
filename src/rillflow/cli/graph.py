"""`rillflow graph`: the nodes of a training step, as a table and as a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rillflow.config.load import FIT, read_raw, validate, validated
from rillflow.config.supervised import FitRecipe
from rillflow.errors import ConfigError
from rillflow.storage import write_atomic
from rillflow.trainer.batches import staged_columns
from rillflow.trainer.graph.builtin import chain_of
from rillflow.trainer.graph.drawing import HEADER, svg, table
from rillflow.trainer.graph.planner import Chain, plan

_COLOURS = {"actor": "blue", "critic": "yellow", "reference": "magenta", "reward": "green"}


def show_graph(name: str, overrides: Sequence[str], policy: str | None, drawing: Path | None) -> None:
    title, chain = find_chain(name, overrides, policy)
    console = Console()
    console.print(Text(title, style="bold"))
    console.print(_rich(chain))
    if drawing is not None:
        write_atomic(drawing.resolve(), svg(chain).encode())
        console.print(f"drawn in {drawing}", highlight=False, soft_wrap=True)


def find_chain(name: str, overrides: Sequence[str], policy: str | None) -> tuple[str, Chain]:
    """Return a title and the chain of nodes of a recipe for `run` or `fit`."""
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
    """Fits 80 characters, long cells on several lines."""
    shown = Table("", "node", "role and kind", *HEADER[3:], box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for number, (node, role, kind, *rest) in enumerate(table(chain), 1):
        shown.add_row(str(number), Text(node, style=f"bold {_COLOURS[role]}"), f"{role} {kind}", *rest)
    shown.columns[3].min_width = 14
    for column in shown.columns[:3]:
        column.no_wrap = True
    return shown
