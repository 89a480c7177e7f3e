"""What every benchmark shares: its arguments, the machine it ran on, and the one object it writes.

`{"bench", "machine", "versions", "command", "results": [{"name", "ours", "peer", "unit", "ratio", "goal", "met"}]}`

A ratio above 1 means we are better; the goal is a ratio, or in rows that say so in their bench an upper limit of ours.
A peer that cannot run leaves `peer`, `ratio` and `met` null and a `reason`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_PACKAGES = ("torch", "transformers", "rillflow")


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="fewer repeats; a couple of minutes on two cores")
    made.add_argument("--json", metavar="FILE", help="write the result object to FILE, or to stdout when it is -")
    return made


@dataclass
class Report:
    """Collects the rows of one benchmark."""

    bench: str
    results: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        name: str,
        ours: float,
        peer: float | None,
        *,
        unit: str,
        goal: float | None = None,
        limit: float | None = None,
        less_is_better: bool = False,
        reason: str = "",
    ) -> None:
        """One row. `reason` says why the peer is missing. A goal is a ratio, or a `limit` that ours must not exceed."""
        ratio = None if peer is None else (peer / ours if less_is_better else ours / peer)
        if limit is not None:
            goal, met = limit, ours <= limit
        else:
            met = None if ratio is None or goal is None else ratio >= goal
        row = {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ratio, "goal": goal, "met": met}
        self.results.append(row | ({"reason": reason} if reason else {}))

    def finish(self, destination: str | None, **more: Any) -> None:
        """Print the table to stderr and write the object, with `more` beside its keys, to the file of `--json`."""
        _print_table(self)
        if destination is None:
            return
        whole = {
            "bench": self.bench,
            "machine": machine(),
            "versions": versions(),
            "command": shlex.join(["python", "-m", f"bench.{self.bench}", *sys.argv[1:]]),
            **more,
            "results": self.results,
        }
        write_json(whole, destination)


def write_json(whole: dict[str, Any], destination: str) -> None:
    """Write an object to a file, or to stdout when `destination` is -."""
    text = json.dumps(whole, indent=2) + "\n"
    if destination == "-":
        sys.stdout.write(text)
    else:
        Path(destination).write_text(text)


def machine() -> dict[str, Any]:
    """Return a description of the hardware."""
    found: dict[str, Any] = {"cpu": _cpu_model(), "cores": os.cpu_count(), "arch": platform.machine(), "gpu": None}
    try:
        import torch
    except ImportError:
        return found
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_model() -> str:
    """`lscpu` also knows the names of ARM cores, which the kernel gives as numbers."""
    if shutil.which("lscpu"):
        listed = subprocess.run(["lscpu", "--json"], capture_output=True, text=True, check=False, timeout=10)
        for entry in _entries(listed.stdout):
            if entry.get("field") == "Model name:":
                return str(entry.get("data"))
    return platform.processor() or "unknown"


def _entries(text: str) -> list[dict[str, Any]]:
    """The lines of `lscpu --json`, whose newer versions nest them."""
    try:
        top = json.loads(text).get("lscpu", [])
    except json.JSONDecodeError:
        return []
    return [inner for entry in top for inner in (entry, *_nested(entry))]


def _nested(entry: dict[str, Any]) -> list[dict[str, Any]]:
    children: list[dict[str, Any]] = entry.get("children", [])
    return [inner for child in children for inner in (child, *_nested(child))]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def interleave(measures: Sequence[Callable[[int], float]], repeats: int) -> list[float]:
    """The median of each measure. They take turns, so that a busy moment of the machine hits all alike."""
    taken: list[list[float]] = [[] for _ in measures]
    for repeat in range(repeats):
        for series, measure in zip(taken, measures, strict=True):
            series.append(measure(repeat))
    return [statistics.median(series) for series in taken]


def _print_table(report: Report) -> None:
    table = Table(title=f"bench {report.bench}")
    add_columns(table)
    for row in report.results:
        table.add_row(*cells(row))
    Console(stderr=True).print(table)


def add_columns(table: Table) -> None:
    """Add the columns of a result."""
    for heading in ("name", "ours", "peer", "unit", "ratio", "goal", "met"):
        table.add_column(heading, justify="left" if heading in {"name", "unit"} else "right")


def cells(row: dict[str, Any]) -> list[str]:
    """Return a result as the cells of a table."""
    name = row["name"] + (f" ({row['reason']})" if "reason" in row else "")
    met = {None: "-", True: "yes", False: "NO"}[row["met"]]
    numbers = {column: _number(row[column]) for column in ("ours", "peer", "ratio", "goal")}
    words = [name, numbers["ours"], numbers["peer"], row["unit"] or "", numbers["ratio"], numbers["goal"], met]
    return [escape(word) for word in words]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
