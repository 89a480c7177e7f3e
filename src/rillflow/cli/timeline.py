"""`rillflow timeline`: how each worker of a run spent its time."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rillflow.errors import RunError
from rillflow.observe.timeline import COLOURS, draw, report, timeline, whole
from rillflow.runtime.folder import RunFolder


def draw_timeline(folder: RunFolder) -> None:
    """Draw the timeline of a run, if it has recorded any spans."""
    with suppress(RunError):
        draw(timeline(folder.root), folder.root / "timeline.png", folder.recipe.name)


def show_timeline(folder: RunFolder, png: Path | None, *, as_json: bool) -> None:
    workers = timeline(folder.root)
    window = whole(workers)
    found = report(workers, window)
    if png is not None:
        draw(workers, png, folder.recipe.name)
    if as_json:
        print(json.dumps({"begin": window.begin, "end": window.end, "workers": found}, indent=2))
        return
    table = Table("worker", *COLOURS, title=f"{window.seconds:.0f} s, by what was done", title_justify="left")
    for worker, spent in found.items():
        table.add_row(worker, *(f"{spent[state]:.1%}" for state in COLOURS))
    console = Console()
    console.print(table)
    if png is not None:
        console.print(f"drawn into {png}", highlight=False, soft_wrap=True)
