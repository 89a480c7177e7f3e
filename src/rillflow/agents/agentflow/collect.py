"""From a run folder to the states that its planners met and what they decided there, for a process reward model.

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
from rillflow.storage.trajectories import FILE, Trajectories, conversation
from rillflow.types.ledgers import folder_of

_UNITS = "units"
_TRANSCRIPT = "transcript"
_EPISODES = (
    "SELECT t.id, t.reward, g.ord, g.prompt, s.unit, s.segment, s.offset, s.length FROM tasks t "
    "JOIN groups g ON g.id = t.grp JOIN samples s ON s.grp = t.grp AND s.place = t.place AND s.n = 0 "
    "WHERE g.lane = 'train' AND t.state = 'done' ORDER BY g.ord, t.place"
)


@dataclass(frozen=True, slots=True)
class Visited:
    """One state of an episode: the prompt that the planner was asked with, and what was sampled from it, malformed
    answers left out. Each decision comes with the reward that the run gave it; the first one was carried out."""

    prompt: str
    decisions: Sequence[tuple[Decision, float | None]]

    @property
    def taken(self) -> Decision:
        return self.decisions[0][0]


@dataclass(frozen=True, slots=True)
class Played:
    """One episode: the question, the states in their order, and how it ended."""

    task: str
    prompt: str
    question: str
    states: Sequence[Visited]
    outcome: float


@dataclass(frozen=True, slots=True)
class Collected:
    """`gone` episodes had no transcript any more, `empty` ones no decision."""

    episodes: list[Played]
    gone: int
    empty: int


def collect(recipe: Recipe, folder: Path) -> Collected:
    """All training episodes of the run in `folder` that can still be read."""
    rows: list[Any] = []
    for ledger in (folder_of(folder, number) / LEDGER for number in range(recipe.dataflow.ledgers)):
        if not ledger.is_file():
            raise DataError(f"{folder} has no ledger", "give the folder of a run that has played episodes")
        with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as database:
            rows += database.execute(_EPISODES).fetchall()
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
        states = states_of(transcript)
        empty += not states
        if states:
            episodes.append(Played(task, prompt, str(asked.payload["question"]), states, outcome))
    return Collected(episodes, gone, empty)


def states_of(transcript: Sequence[Mapping[str, Any]]) -> list[Visited]:
    """Return the states of an episode in which the planner decided something, in their order."""
    found: dict[str, list[tuple[Decision, float | None]]] = {}
    for number, entry in enumerate(transcript):
        messages = conversation(transcript, number) if entry.get("agent") == ROLE else []
        if len(messages) < 2 or messages[-1].get("role") != "assistant":
            continue
        decision = parse(str(messages[-1].get("content") or ""))
        if decision is not None:
            rewards = [given["reward"] for given in entry.get("rewards", ())]
            asked = str(messages[-2].get("content") or "")
            found.setdefault(asked, []).append((decision, rewards[-1] if rewards else None))
    return [Visited(prompt, decisions) for prompt, decisions in found.items()]


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
