"""From a run folder to the steps that its planners took, for a process reward model to learn from.

Only training episodes are read: what is evaluated on is never learned from. Transcripts lie in the storage units as
long as those keep them (`dataflow.units.drop_after`), some of them also among the trajectories that the run keeps for
people; episodes whose transcript is gone from both are counted, not guessed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rillflow.agents.agentflow.actions import Decision, parse
from rillflow.agents.agentflow.planner import ROLE
from rillflow.clients.columns import dtypes_of
from rillflow.clients.directory import UNIT_ID_FILE
from rillflow.config import Recipe
from rillflow.dataflow.main import LEDGER
from rillflow.dataflow.sources import open_sources
from rillflow.errors import CorruptData, DataError
from rillflow.storage import SegmentReader
from rillflow.storage.records import Place
from rillflow.storage.trajectories import FILE, Trajectories

_UNITS = "units"
_TRANSCRIPT = "transcript"
_EPISODES = (
    "SELECT t.id, t.reward, g.ord, g.prompt, s.unit, s.segment, s.offset, s.length FROM tasks t "
    "JOIN groups g ON g.id = t.grp JOIN samples s ON s.grp = t.grp AND s.place = t.place AND s.n = 0 "
    "WHERE g.lane = 'train' AND t.state = 'done' ORDER BY g.ord, t.place"
)


@dataclass(frozen=True, slots=True)
class Played:
    """One episode: what was asked, what the planner decided (without what was malformed), and how it ended."""

    task: str
    prompt: str
    question: str
    decisions: Sequence[Decision]
    outcome: float


@dataclass(frozen=True, slots=True)
class Collected:
    """`gone` episodes had no transcript any more, `empty` ones no decision."""

    episodes: list[Played]
    gone: int
    empty: int


def collect(recipe: Recipe, folder: Path) -> Collected:
    """All training episodes of the run in `folder` that can still be read."""
    ledger = folder / LEDGER
    if not ledger.is_file():
        raise DataError(f"{folder} has no ledger", "give the folder of a run that has played episodes")
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as database:
        rows = database.execute(_EPISODES).fetchall()
    source = open_sources(recipe.data.prompts, seed=recipe.seed, shuffle=recipe.data.shuffle)
    episodes: list[Played] = []
    gone = empty = 0
    kept = _kept(folder)
    for (task, outcome, place, prompt, *_), found in zip(rows, _transcripts(folder, rows), strict=True):
        transcript = kept.get(task) if found is None else found
        if transcript is None:
            gone += 1
            continue
        asked = source.at(place)
        if asked.id != prompt:
            raise DataError(f"prompt {place} was {prompt!r} and is {asked.id!r} now", "restore the run's prompts")
        decisions = decisions_of(transcript)
        empty += not decisions
        if decisions:
            episodes.append(Played(task, prompt, str(asked.payload["question"]), decisions, outcome))
    return Collected(episodes, gone, empty)


def decisions_of(transcript: Sequence[Mapping[str, Any]]) -> list[Decision]:
    """What the planner decided, in order; each of its answers is a leaf of its own."""
    said = [entry["messages"][-1] for entry in transcript if entry.get("agent") == ROLE and entry["messages"]]
    found = [parse(str(message.get("content") or "")) for message in said if message.get("role") == "assistant"]
    return [decision for decision in found if decision is not None]


def _kept(folder: Path) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Return the transcripts of the training episodes that the run keeps for people."""
    if not (folder / FILE).is_file():
        return {}
    return {one.info.id: one.paths for one in Trajectories(folder, lane="train", status="done") if one.paths}


def _transcripts(folder: Path, rows: Sequence[tuple[Any, ...]]) -> Iterator[list[dict[str, Any]] | None]:
    readers = {
        (unit / UNIT_ID_FILE).read_text(): SegmentReader(unit)
        for unit in sorted((folder / _UNITS).glob("*"))
        if (unit / UNIT_ID_FILE).is_file()
    }
    dtypes = dtypes_of([_TRANSCRIPT])
    for *_, unit, segment, offset, length in rows:
        reader = readers.get(unit)
        found = None if reader is None else reader.read([Place(segment, offset, length)], dtypes)[0]
        if found is None or isinstance(found, CorruptData) or _TRANSCRIPT not in found:
            yield None
        else:
            yield msgspec.json.decode(found[_TRANSCRIPT].tobytes())
