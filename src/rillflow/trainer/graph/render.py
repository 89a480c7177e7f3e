"""A chain to look at: a table of its nodes as text, and a drawing as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.trainer.graph.nodes import Node
from rillflow.trainer.graph.planner import Chain

HEADER = ("node", "role", "kind", "reads", "makes", "per")


def table(chain: Chain) -> list[tuple[str, ...]]:
    """A row for each node, in the order in which they run; the columns are those of HEADER."""
    made: set[str] = set()
    rows: list[tuple[str, ...]] = []
    for node in chain.nodes:
        read = [*node.reads, *(name for name in node.optional if name in made)]
        rows.append((node.id, node.role, node.kind, ", ".join(read), _makes(node), _per(node)))
        made |= set(node.gives)
    return rows


def text(chain: Chain) -> str:
    """The table with aligned columns, for logs and errors."""
    rows: Sequence[tuple[str, ...]] = [HEADER, *table(chain)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADER))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _makes(node: Node) -> str:
    own = ", ".join(node.function.gives)
    return (f"rows, {own}" if own else "rows") if node.is_source else own


def _per(node: Node) -> str:
    """How often it runs, and on how many ranks where not on all."""
    often = node.function.scope if node.on_columns else "part" if node.is_source else "step"
    return often if node.ranks is None else f"{often}, {node.ranks} ranks"
