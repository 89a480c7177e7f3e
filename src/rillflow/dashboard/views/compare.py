"""Two runs side by side: their figures, their curves in the same charts, and where their recipes differ."""

from __future__ import annotations

from typing import Any

import msgspec

from rillflow.dashboard.views.charts import OVERVIEW, Picture, Window, pictures, reward_chart
from rillflow.dashboard.views.overview import figures, heading
from rillflow.dashboard.watched import WatchedRun

_MOST_DIFFERENCES = 400
_NULL = "null"


def compare(run: WatchedRun, other: WatchedRun, window: Window) -> dict[str, Any]:
    for one in (run, other):
        one.curves.follow()
    return {
        "runs": [heading(run, None), heading(other, None)],
        "figures": _beside(figures(run, None), figures(other, None)),
        "charts": _together(_pictures(run, window), _pictures(other, window)),
        "recipe": differences(run.recipe, other.recipe),
    }


def _beside(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for side, found in (("left", left), ("right", right)):
        for one in found:
            rows.setdefault(one["name"], {"name": one["name"], "unit": one["unit"], "left": None, "right": None})
            rows[one["name"]][side] = one["value"]
    return list(rows.values())


def _pictures(run: WatchedRun, window: Window) -> list[Picture]:
    return [reward_chart(run, window), *pictures(run, OVERVIEW, window)]


def _together(left: list[Picture], right: list[Picture]) -> list[Picture]:
    """One chart for each that either run has; `A` and `B` before the names of lines tell whose they are."""
    both: dict[str, Picture] = {}
    for mark, found in (("A", left), ("B", right)):
        for picture in found:
            joined = both.setdefault(picture.key, msgspec.structs.replace(picture, lines=[]))
            joined.lines += [msgspec.structs.replace(line, name=f"{mark} {line.name}") for line in picture.lines]
    return list(both.values())


def differences(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """The settings that are not the same, by their path in the recipe; unset ones count as null."""
    one, other = dict(_flat(left)), dict(_flat(right))
    rows = [
        {"path": path, "left": one.get(path), "right": other.get(path)}
        for path in dict.fromkeys((*one, *other))
        if one.get(path, _NULL) != other.get(path, _NULL) and path not in ("name", "description")
    ]
    return {"rows": rows[:_MOST_DIFFERENCES], "left_out": max(len(rows) - _MOST_DIFFERENCES, 0)}


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """The leaves of a recipe; an empty list or mapping is one, too."""
    if isinstance(value, dict) and value:
        return [leaf for key, one in value.items() for leaf in _flat(one, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list) and value:
        return [leaf for index, one in enumerate(value) for leaf in _flat(one, f"{path}[{index}]")]
    return [(path, msgspec.json.encode(value).decode() if not isinstance(value, str) else value)]
