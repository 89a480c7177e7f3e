"""Shows a chain: as a table in text, and as an SVG with boxes coloured by role and arrows labelled with columns.

Boxes are numbered in the order in which they run. They stand in layers from left to right, each as far left as its
arrows allow. An arrow over several layers gets a slot in each of them, so it passes between boxes and never through
one. Columns that nodes make are drawn in full. Columns of the fetched rows, and edges without columns, are drawn only
if a box would have no other arrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from rillflow.trainer.graph.nodes import Node
from rillflow.trainer.graph.planner import Chain, Edge

HEADER = ("node", "role", "kind", "reads", "makes", "per")


def table(chain: Chain) -> list[tuple[str, ...]]:
    """Return a row for each node, in the order in which they run; the columns are those of HEADER."""
    made: set[str] = set()
    rows: list[tuple[str, ...]] = []
    for node in chain.nodes:
        read = [*node.reads, *(name for name in node.optional if name in made)]
        rows.append((node.id, node.role, node.kind, ", ".join(read), _makes(node), _per(node)))
        made |= set(node.gives)
    return rows


def text(chain: Chain) -> str:
    """Return the table with aligned columns, for logs and errors."""
    rows: Sequence[tuple[str, ...]] = [HEADER, *table(chain)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADER))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _makes(node: Node) -> str:
    own = ", ".join(node.function.gives)
    return (f"rows, {own}" if own else "rows") if node.is_source else own


def _per(node: Node) -> str:
    """Return how often a node runs, and its number of ranks if that is not all."""
    often = node.function.scope if node.on_columns else "part" if node.is_source else "step"
    return often if node.ranks is None else f"{often}, {node.ranks} ranks"


# ---------------------------------------------------------------- the drawing


_BOX_W, _BOX_H = 178.0, 54.0
_SLOT_H = 34.0  # of an arrow that passes a layer
_GAP_X, _GAP_Y = 128.0, 24.0
_MARGIN = 28.0
_CHAR = 6.7  # width of a character of a label
_MOST_NAMES = 3
_SWEEPS = 8
# Stroke and fill of each role.
_COLOURS = {
    "actor": ("#2563a8", "#e8f1fb"),
    "critic": ("#b4540a", "#fdf0e3"),
    "reference": ("#6b4fa0", "#f2edfa"),
    "reward": ("#2e7d4f", "#e8f6ed"),
}
_STYLE = """
  text { font-family: system-ui, "Segoe UI", Helvetica, "DejaVu Sans", Arial, sans-serif; fill: #1f2933; }
  .id { font-size: 14px; font-weight: 600; }
  .what { font-size: 12px; fill: #52606d; }
  .number { font-size: 11px; font-weight: 600; fill: #ffffff; text-anchor: middle; }
  .label { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; font-size: 11px; text-anchor: middle; }
  .arrow { fill: none; stroke: #7b8794; stroke-width: 1.5; }
  .order { stroke-dasharray: 4 4; }
"""


@dataclass
class _Slot:
    """A place in a layer, for a node or for an arrow that passes."""

    layer: int
    height: float
    y: float = 0.0  # the middle
    before: list[_Slot] = field(default_factory=list)
    after: list[_Slot] = field(default_factory=list)

    @property
    def x(self) -> float:
        return _MARGIN + self.layer * (_BOX_W + _GAP_X)


def svg(chain: Chain) -> str:
    edges = _drawn(chain)
    depth = _depths(chain, edges)
    boxes = {node.id: _Slot(depth[node.id], _BOX_H) for node in chain.nodes}
    paths = {edge: _path(boxes[edge.before], boxes[edge.after]) for edge in edges}
    layers = _layers(list(boxes.values()), list(paths.values()))
    _arrange(layers)
    width = _MARGIN * 2 + len(layers) * (_BOX_W + _GAP_X) - _GAP_X
    height = max(slot.y + slot.height / 2 for layer in layers for slot in layer) + _MARGIN
    arrows, labels = _arrows(paths)
    drawn = [_box(number, node, boxes[node.id]) for number, node in enumerate(chain.nodes, 1)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" role="img">',
            f"<title>{escape(' → '.join(node.id for node in chain.nodes))}</title>",
            f"<style>{_STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0.5 L8 4 L0 7.5 z" fill="#7b8794"/></marker></defs>',
            '<rect width="100%" height="100%" rx="10" fill="#ffffff"/>',
            *arrows,
            *drawn,
            *labels,
            "</svg>\n",
        ]
    )


# ---------------------------------------------------------------- which edges are drawn


def _drawn(chain: Chain) -> list[Edge]:
    """Return the edges to draw: columns that nodes make; rows, from the source to nodes that read nothing else; and an
    order that no longer path implies, for nodes without another arrow."""
    source = chain.nodes[0].id
    made = [edge for edge in chain.edges if edge.columns and edge.before != source]
    fed = {edge.after for edge in made}
    rows = [
        _rows(edge) for edge in chain.edges if edge.before == source and edge.after not in fed | {chain.nodes[-1].id}
    ]
    ahead, read = fed | {edge.after for edge in rows}, {edge.before for edge in made}
    implied = _implied(chain)
    return [
        *made,
        *rows,
        *(
            edge
            for edge in chain.edges
            if not edge.columns and edge.before != source and (edge.before, edge.after) not in implied
            if edge.after not in ahead or edge.before not in read
        ),
    ]


def _rows(edge: Edge) -> Edge:
    return edge if 0 < len(edge.columns) <= _MOST_NAMES else Edge(edge.before, edge.after, ("rows",))


def _implied(chain: Chain) -> set[tuple[str, str]]:
    """Return the pairs of nodes that a path over other nodes connects too."""
    after: dict[str, set[str]] = {node.id: set() for node in chain.nodes}
    for edge in chain.edges:
        after[edge.before].add(edge.after)
    reach: dict[str, set[str]] = {}
    implied: set[tuple[str, str]] = set()
    for node in reversed(chain.nodes):
        further: set[str] = set().union(*(reach[name] for name in after[node.id]))
        implied |= {(node.id, name) for name in further}
        reach[node.id] = after[node.id] | further
    return implied


def _depths(chain: Chain, edges: Sequence[Edge]) -> dict[str, int]:
    """Return the length of the longest path of arrows to each node."""
    depth: dict[str, int] = {}
    for node in chain.nodes:
        depth[node.id] = max((depth[edge.before] + 1 for edge in edges if edge.after == node.id), default=0)
    return depth


def _path(start: _Slot, end: _Slot) -> list[_Slot]:
    """Return the slots from box to box, one in every layer between."""
    path = [start, *(_Slot(layer, _SLOT_H) for layer in range(start.layer + 1, end.layer)), end]
    for before, after in pairwise(path):
        before.after.append(after)
        after.before.append(before)
    return path


# ---------------------------------------------------------------- placement


def _layers(boxes: Sequence[_Slot], paths: Sequence[Sequence[_Slot]]) -> list[list[_Slot]]:
    slots = [*boxes, *(slot for path in paths for slot in path[1:-1])]
    return [[slot for slot in slots if slot.layer == layer] for layer in range(max(s.layer for s in slots) + 1)]


def _arrange(layers: Sequence[list[_Slot]]) -> None:
    """Order the slots of each layer by their neighbours' places, forwards and backwards, and centre the layers."""
    for layer in layers:
        _stack(layer)
    for sweep in range(_SWEEPS):
        forwards = sweep % 2 == 0
        for layer in layers if forwards else reversed(layers):
            layer.sort(key=lambda slot: _middle(slot.before if forwards else slot.after, slot.y))
            _stack(layer)
    top = min(slot.y - slot.height / 2 for layer in layers for slot in layer)
    for layer in layers:
        for slot in layer:
            slot.y += _MARGIN - top


def _middle(slots: Sequence[_Slot], default: float) -> float:
    return sum(slot.y for slot in slots) / len(slots) if slots else default


def _stack(layer: Sequence[_Slot]) -> None:
    """Place slots under each other, centred on 0."""
    y = -(sum(slot.height for slot in layer) + _GAP_Y * (len(layer) - 1)) / 2
    for slot in layer:
        slot.y = y + slot.height / 2
        y += slot.height + _GAP_Y


# ---------------------------------------------------------------- drawing


def _box(number: int, node: Node, slot: _Slot) -> str:
    stroke, fill = _COLOURS[node.role]
    x, y = slot.x, slot.y - slot.height / 2
    what = f"{node.role} · {node.kind}" + (f" · {node.ranks} ranks" if node.ranks else "")
    # A long name is condensed to fit its box.
    fit = f' textLength="{_BOX_W - 50:.0f}" lengthAdjust="spacingAndGlyphs"' if len(node.id) > 17 else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{_BOX_W}" height="{_BOX_H}" rx="9" fill="{fill}" stroke="{stroke}" '
        f'stroke-width="1.5"/><circle cx="{x + 21:.1f}" cy="{slot.y:.1f}" r="10.5" fill="{stroke}"/>'
        f'<text class="number" x="{x + 21:.1f}" y="{slot.y + 4:.1f}">{number}</text>'
        f'<text class="id" x="{x + 40:.1f}" y="{slot.y - 3:.1f}"{fit}>{escape(node.id)}</text>'
        f'<text class="what" x="{x + 40:.1f}" y="{slot.y + 15:.1f}">{what}</text>'
    )


def _arrows(paths: Mapping[Edge, Sequence[_Slot]]) -> tuple[list[str], list[str]]:
    arrows, labels = [], []
    for edge, path in paths.items():
        points = _points(path)
        style = "arrow" if edge.columns else "arrow order"
        arrows.append(f'<path class="{style}" d="{_curve(points)}" marker-end="url(#head)"/>')
        if edge.columns:
            passed = path[1] if len(path) > 2 else None
            (x0, y0), (x1, y1) = points[:2]
            where = (passed.x + _BOX_W / 2, passed.y) if passed else (x0 + 0.45 * (x1 - x0), y0 + 0.425 * (y1 - y0))
            labels.append(_label(edge.columns, *where))
    return arrows, labels


def _points(path: Sequence[_Slot]) -> list[tuple[float, float]]:
    """Return the ends of the curves and of the straight pieces between them: two for each slot on the way."""
    start, *passed, end = path
    points = [(start.x + _BOX_W, _port(start, start.after, path[1]))]
    for slot in passed:
        points += [(slot.x, slot.y), (slot.x + _BOX_W, slot.y)]
    return [*points, (end.x, _port(end, end.before, path[-2]))]


def _port(box: _Slot, others: Sequence[_Slot], other: _Slot) -> float:
    """Return where the arrow to or from `other` touches a side of the box; arrows keep the order of their other
    ends."""
    place = sorted(others, key=lambda slot: slot.y).index(other)
    return box.y + (place + 1) * box.height / (len(others) + 1) - box.height / 2


def _curve(points: Sequence[tuple[float, float]]) -> str:
    d = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        bend = (x1 - x0) / 2
        d += f" C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    return d


def _label(columns: Sequence[str], x: float, y: float) -> str:
    shown = list(columns[:_MOST_NAMES])
    if len(columns) > _MOST_NAMES:
        shown[-1] = f"+ {len(columns) - _MOST_NAMES + 1} more"
    width, height = max(map(len, shown)) * _CHAR + 8, 14.0 * len(shown) + 2
    top = y - height / 2
    lines = "".join(
        f'<text class="label" x="{x:.1f}" y="{top + 12 + 14 * place:.1f}">{escape(name)}</text>'
        for place, name in enumerate(shown)
    )
    return (
        f'<rect x="{x - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" '
        f'fill="#ffffff" fill-opacity="0.92"/>{lines}'
    )
