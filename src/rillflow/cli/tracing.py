"""`rillflow trace`: the trace of a run, and the life of one of its episodes."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rillflow.dataflow.episode_history import life_of, read_history
from rillflow.dataflow.ledger.snapshot import snapshot
from rillflow.observe.trace import trace
from rillflow.runtime.folder import RunFolder
from rillflow.storage import write_atomic
from rillflow.storage.spans import read_spans
from rillflow.types.ledgers import ledger_of


def write_trace(folder: RunFolder, path: Path, most: int) -> None:
    """Write the trace of a run, live or finished, and say where it is and what it leaves out."""
    with snapshot(folder.ledger) as reads:
        history = read_history(reads, most)
    made = trace(read_spans(folder.root), history, _now(folder))
    write_atomic(path, json.dumps(made).encode())
    shown, episodes = len(history.episodes), history.episodes_in_all
    what = f"{shown} episodes" if shown == episodes else f"the newest {shown} of {episodes} episodes"
    what += " of the first ledger" if len(folder.ledgers) > 1 else ""
    console = Console(stderr=True)
    console.print(f"{path}: {what}; open it at https://ui.perfetto.dev", highlight=False, soft_wrap=True)


def print_life(folder: RunFolder, episode: str) -> None:
    ledgers = folder.ledgers
    with snapshot(ledgers[min(ledger_of(episode), len(ledgers) - 1)]) as reads:
        moments = life_of(reads, episode)
    table = Table("seconds", "what", title=f"Episode {episode}", title_justify="left")
    table.columns[0].justify = "right"
    for moment in moments:
        table.add_row(f"{moment.time - moments[0].time:.3f}", moment.what)
    Console().print(table)


def _now(folder: RunFolder) -> float:
    """When the run ended; of one that runs, this moment."""
    state = folder.state()
    return time.time() if state["state"] in ("new", "running") else float(state["time"])
