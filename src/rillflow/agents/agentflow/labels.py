"""From a run folder to labelled decisions, the rows of `rillflow fit` for a process reward model.

`collect` reads the states that the planners of a run met and their decisions there. Only training episodes are read.
Transcripts are in the storage units as long as those keep them (`dataflow.units.drop_after`), some also among the kept
trajectories; episodes whose transcript is gone from both are counted.

A label belongs to a state and a decision. `by_continuations` takes the mean outcomes that a run with
`process_reward.continuations` gave to every sampled decision; `by_returns` the mean outcome of the run's own episodes
that took the decision in that state; `by_judge` asks a model behind an OpenAI-compatible server, once for each decision
that was carried out; `both` averages two ways of labelling. A judge also sees the result of the decision, as the prompt
that the planner was asked with next. No label is made up: a decision without one is left out, and counted.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from rillflow.agents.agentflow.models import ROLE, Decision, new_client, parse, prm_row, without_results
from rillflow.agents.agentflow.options import Endpoint
from rillflow.agents.rewards.judge import ask_score
from rillflow.clients.unit_directory import UNIT_ID_FILE, dtypes_of
from rillflow.config import Recipe
from rillflow.dataflow.main import LEDGER
from rillflow.dataflow.sources import open_sources
from rillflow.errors import CorruptData, DataError, RewardError
from rillflow.storage import SegmentReader
from rillflow.storage.records import Place
from rillflow.storage.trajectories import Trajectories
from rillflow.storage.trajectory_format import FILE, conversation
from rillflow.types.runs import folder_of

if TYPE_CHECKING:
    from openai import AsyncOpenAI

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


Key = tuple[str, str, Decision]  # prompt's id, state, decision
Labels = Mapping[Key, float]

GOOD = 0.5  # a label from here on counts as good when classes are balanced


def by_returns(episodes: Iterable[Played]) -> Labels:
    """Label the decisions that were carried out. Outcomes outside 0 to 1 are cut to that."""
    return _means(
        ((episode.prompt, state.prompt, state.taken), episode.outcome)
        for episode in episodes
        for state in episode.states
    )


def by_continuations(episodes: Iterable[Played]) -> Labels:
    """Label every sampled decision by the reward that the run gave it."""
    return _means(
        ((episode.prompt, state.prompt, decision), reward)
        for episode in episodes
        for state in episode.states
        for decision, reward in state.decisions
        if reward is not None
    )


def both(first: Labels, second: Labels) -> Labels:
    """Average two labellings where both have a label; elsewhere take the one that has."""
    return {key: fmean(one[key] for one in (first, second) if key in one) for key in {**first, **second}}


def rows_of(episodes: Iterable[Played], labels: Labels, *, results: bool = True) -> list[dict[str, Any]]:
    """Return a row for every labelled decision. Without `results` the states lack those of earlier decisions."""
    rows: dict[Key, dict[str, Any]] = {}
    for episode in episodes:
        earlier: list[Decision] = []
        for state in episode.states:
            text = state.prompt if results else without_results(episode.question, earlier)
            for decision, _ in state.decisions:
                key = (episode.prompt, state.prompt, decision)
                if key in labels:
                    rows[key] = prm_row(text, decision, labels[key])
            earlier.append(state.taken)
    return list(rows.values())


def balanced(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with those of the rarer class repeated until good and bad labels are as many. Only for training:
    a model that sees one good decision among many bad ones learns to call all of them bad."""
    good = [row for row in rows if row["steps"][0]["label"] >= GOOD]
    bad = [row for row in rows if row["steps"][0]["label"] < GOOD]
    if not good or not bad:
        return list(rows)
    size = max(len(good), len(bad))
    return [row for pair in zip(islice(cycle(good), size), islice(cycle(bad), size), strict=True) for row in pair]


def split(episodes: Sequence[Played], every: int) -> tuple[list[Played], list[Played]]:
    """Those to learn from, and those of every n-th prompt, apart: no prompt is in both."""
    apart = set(sorted({episode.prompt for episode in episodes})[every - 1 :: every])
    return (
        [episode for episode in episodes if episode.prompt not in apart],
        [episode for episode in episodes if episode.prompt in apart],
    )


def _means(values: Iterable[tuple[Key, float]]) -> Labels:
    found: dict[Key, list[float]] = defaultdict(list)
    for key, value in values:
        found[key].append(min(1.0, max(0.0, value)))
    return {key: fmean(values) for key, values in found.items()}


AT_ONCE = 8
_TRIES = 3
RUBRIC = (
    "Rate one decision of an agent that answers a question step by step.\n"
    "1.0: correct and clear progress. 0.7: useful, not the best. 0.5: does no harm and brings little. "
    "0.2: useless, repeated or a guess. 0.0: wrong.\n"
    'Write exactly one JSON object: {"score": number}.\n'
)


async def by_judge(episodes: Sequence[Played], endpoint: Endpoint) -> tuple[Labels, int]:
    """Return the labels, and how many decisions have none."""
    asked: dict[Key, str] = {}
    for episode in episodes:
        after = [state.prompt for state in episode.states[1:]] + [None]
        for state, later in zip(episode.states, after, strict=True):
            asked[episode.prompt, state.prompt, state.taken] = judge_prompt(state.prompt, state.taken, later)
    gate = asyncio.Semaphore(AT_ONCE)

    async def score(prompt: str) -> float | None:
        async with gate:
            return await _score(client, endpoint, prompt)

    # Its own, closed at its end: the next call may come from another event loop, which cannot use these connections.
    async with new_client(endpoint) as client:
        scores = await asyncio.gather(*(score(prompt) for prompt in asked.values()))
    labels = {key: score for key, score in zip(asked, scores, strict=True) if score is not None}
    return labels, len(asked) - len(labels)


def judge_prompt(state: str, decision: Decision, later: str | None) -> str:
    """Return what the judge is asked; `later` is the prompt after the decision, None if it ended the episode."""
    shown = "The decision ended the task." if later is None else f"Afterwards the agent was asked:\n{later}"
    return f"{RUBRIC}\nThe agent was asked:\n{state}\n\nIt decided:\n{decision.written()}\n\n{shown}"


async def _score(client: AsyncOpenAI, endpoint: Endpoint, prompt: str) -> float | None:
    """Return the judge's score, or None if the judge gives none."""
    try:
        return await ask_score(client, endpoint.model, prompt, best=1.0, attempts=_TRIES, timeout=endpoint.seconds)
    except RewardError:
        return None
