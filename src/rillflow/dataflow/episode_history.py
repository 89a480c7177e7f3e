"""The history of episodes, read from the ledgers of a run: leases and ends, and the steps that trained them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rillflow.clients.sums import SEPARATOR
from rillflow.dataflow.ledger.database import Snapshot, snapshot
from rillflow.errors import RunError

_EPISODES = """
SELECT a.id AS attempt, t.id AS id, a.node, a.state, a.cause, a.leased_at AS begin, a.ended_at AS end,
    t.grp AS grp, g.lane AS lane, t.reward, t.samples, t.calls,
    t.attempt = a.id AND a.state = 'done' AS counts, g.prompt
FROM attempts a JOIN tasks t ON t.grp = a.grp AND t.place = a.place JOIN groups g ON g.id = t.grp
"""
# Every batch that a group was trained in, replays included; the step of a batch is on a live or an orphaned line.
_STEPS = """
SELECT b.id AS batch, b.policy, b.state, b.leased_at AS begin, b.ended_at AS end, b.members AS groups, b.samples,
    b.produced AS version, s.at, s.step_seconds AS seconds, s.wait_seconds AS waited, s.reward, s.state AS line
FROM batches b LEFT JOIN steps s ON s.policy = b.policy AND s.version = b.produced
"""

_NEVER = 1e300  # after every time


class Episode(NamedTuple):
    """One attempt at a task. `counts`: its samples were taken. A held one has no end yet."""

    attempt: str
    id: str
    node: str
    state: str
    cause: str
    begin: float
    end: float | None
    group: str
    lane: str
    reward: float | None
    samples: int
    calls: int | None
    counts: bool
    prompt: str


class Step(NamedTuple):
    """A batch, and the optimizer step that it became; `at` is when the step was committed."""

    batch: str
    policy: str
    state: str
    begin: float
    end: float | None
    groups: int
    samples: int
    version: int | None
    at: float | None
    seconds: float | None
    waited: float | None
    reward: float | None
    line: str | None


class Evaluation(NamedTuple):
    """An evaluation round."""

    id: int
    version: int
    state: str
    begin: float
    end: float | None
    reward: float | None


@dataclass(frozen=True)
class History:
    """The newest episodes, in the order of their leases; all batches; the batches that each group was trained in."""

    episodes: list[Episode]
    episodes_in_all: int
    steps: list[Step]
    evaluations: list[Evaluation]
    batches_of: dict[str, list[str]]


def read_history(reads: Snapshot, most: int) -> History:
    """Return at most `most` episodes and as many steps."""
    episodes = reads.all(f"{_EPISODES} ORDER BY a.leased_at DESC LIMIT ?", (most,))
    steps = reads.all(f"{_STEPS} ORDER BY b.leased_at DESC LIMIT ?", (most,))
    rounds = reads.all(
        "SELECT id, version, state, admitted_at AS begin, ended_at AS end, reward FROM rounds ORDER BY id DESC LIMIT ?",
        (most,),
    )
    groups = {row["grp"] for row in episodes}
    batches_of: dict[str, list[str]] = {}
    for row in reads.connection.execute("SELECT grp, batch FROM members ORDER BY batch, n"):
        if row["grp"] in groups:
            batches_of.setdefault(row["grp"], []).append(row["batch"])
    return History(
        episodes=[_episode(row) for row in reversed(episodes)],
        episodes_in_all=int(reads.value("SELECT count(*) FROM attempts")),
        steps=[Step(*row) for row in reversed(steps)],
        evaluations=[Evaluation(*row) for row in reversed(rounds)],
        batches_of=batches_of,
    )


def read_histories(paths: Sequence[Path], most: int) -> History:
    """Return the history of a run from its ledgers, the first one's first. A step that several ledgers have committed
    is one step of one batch; the first ledger's numbers are those of the whole step."""
    found = []
    for path in paths:
        with snapshot(path) as reads:
            found.append(read_history(reads, most))
    if len(found) == 1:
        return found[0]
    parts: dict[tuple[str, int | str], list[Step]] = {}
    for step in (step for history in found for step in history.steps):
        parts.setdefault((step.policy, step.batch if step.version is None else step.version), []).append(step)
    steps = {part.batch: _joined(of_one) for of_one in parts.values() for part in of_one}
    return History(
        episodes=sorted((one for history in found for one in history.episodes), key=lambda one: one.begin)[-most:],
        episodes_in_all=sum(history.episodes_in_all for history in found),
        steps=sorted(set(steps.values()), key=lambda step: (step.begin, step.batch))[-most:],
        evaluations=[one for history in found for one in history.evaluations],
        batches_of={
            group: list(dict.fromkeys(steps[batch].batch for batch in batches if batch in steps))
            for history in found
            for group, batches in history.batches_of.items()
        },
    )


def _joined(parts: Sequence[Step]) -> Step:
    """Return one step of the batches that several ledgers gave to it."""
    ends = [part.end for part in parts if part.end is not None]
    return parts[0]._replace(
        batch=SEPARATOR.join(part.batch for part in parts),
        begin=min(part.begin for part in parts),
        end=max(ends, default=None),
        groups=sum(part.groups for part in parts),
        samples=sum(part.samples for part in parts),
    )


def _episode(row: sqlite3.Row) -> Episode:
    return Episode(*row)._replace(counts=bool(row["counts"]))


def ended_episodes(reads: Snapshot, after: float, most: int) -> list[Episode]:
    """Return the first `most` episodes that ended after a time, and those that ended at the same moment as the last."""
    last = reads.value(
        "SELECT ended_at FROM attempts WHERE ended_at > ? ORDER BY ended_at LIMIT 1 OFFSET ?", (after, most - 1)
    )
    rows = reads.all(
        f"{_EPISODES} WHERE a.ended_at > ? AND a.ended_at <= ? ORDER BY a.ended_at", (after, last or _NEVER)
    )
    return [_episode(row) for row in rows]


def ended_steps(ledgers: Sequence[Snapshot], after: float, most: int) -> list[tuple[Step, list[tuple[str, str]]]]:
    """Return the first `most` steps that were committed after a time, and those of the same moment as the last; each
    with the ids and attempts of the episodes that it trained. A step is committed to the first ledger last."""
    first, *others = ledgers
    last = first.value("SELECT at FROM steps WHERE at > ? ORDER BY at LIMIT 1 OFFSET ?", (after, most - 1))
    rows = first.all(f"{_STEPS} WHERE s.at > ? AND s.at <= ? ORDER BY s.at", (after, last or _NEVER))
    found = []
    for step in (Step(*row) for row in rows):
        query = f"{_STEPS} WHERE s.policy = ? AND s.version = ?"
        parts = [(first, step)]
        parts += [(reads, Step(*row)) for reads in others for row in reads.all(query, (step.policy, step.version))]
        episodes = [episode for reads, part in parts for episode in _trained_by(reads, part.batch)]
        found.append((_joined([part for _, part in parts]), episodes))
    return found


def _trained_by(reads: Snapshot, batch: str) -> list[tuple[str, str]]:
    rows = reads.all(
        "SELECT DISTINCT t.id, t.attempt FROM members m JOIN tasks t ON t.grp = m.grp "
        "WHERE m.batch = ? AND t.state = 'done' ORDER BY t.id",
        (batch,),
    )
    return [(row["id"], row["attempt"]) for row in rows]


# ---------------------------------------------------------------- the life of one episode


class Moment(NamedTuple):
    """Something that happened to an episode, in words."""

    time: float
    what: str


def life_of(reads: Snapshot, task: str) -> list[Moment]:
    """Return the history of one task, from its prompt to the optimizer steps; raises RunError for an unknown task."""
    rows = reads.all(
        "SELECT t.*, g.lane, g.prompt, g.admitted_at, g.state AS gstate, g.cause AS gcause, g.ended_at AS gended "
        "FROM tasks t JOIN groups g ON g.id = t.grp WHERE t.grp = ? AND t.place = ?",
        _place(task),
    )
    if not rows:
        known = reads.value("SELECT id FROM tasks ORDER BY grp, place LIMIT 1")
        raise RunError(f"the run has no episode {task!r}", f"ids are such as {known}; `rillflow trace RUN` shows all")
    row = rows[0]
    moments = [Moment(row["admitted_at"], f"prompt {row['prompt']} admitted as group {row['grp']} ({row['lane']})")]
    for one in reads.all(f"{_EPISODES} WHERE a.grp = ? AND a.place = ? ORDER BY a.leased_at", _place(task)):
        moments += _of_attempt(_episode(one))
    moments += _of_samples(reads, row)
    if row["gended"] is not None:
        why = f" ({row['gcause']})" if row["gcause"] else ""
        moments.append(Moment(row["gended"], f"group {row['grp']} ended: {row['gstate']}{why}"))
    if row["lane"] == "train":
        for step in _steps_of(reads, row["grp"]):
            moments += _of_step(step)
    return sorted(moments, key=lambda moment: moment.time)


def _place(task: str) -> tuple[str, int]:
    """Return the group of a task and its place in the group; a place that no task has for what is not a task's id."""
    group, _, place = task.rpartition(".")
    return group, int(place) if place.isdecimal() and len(place) < 10 else -1


def _of_attempt(episode: Episode) -> list[Moment]:
    found = [Moment(episode.begin, f"leased to {episode.node} as {episode.attempt}")]
    if episode.end is not None:
        why = f" ({episode.cause})" if episode.cause else ""
        found.append(
            Moment(episode.end, f"{episode.attempt} {episode.state}{why} after {episode.end - episode.begin:.2f} s")
        )
    return found


def _of_samples(reads: Snapshot, task: sqlite3.Row) -> list[Moment]:
    rows = reads.all("SELECT * FROM samples WHERE grp = ? AND place = ? ORDER BY n", (task["grp"], task["place"]))
    return [
        Moment(
            task["ended_at"] or task["admitted_at"],
            f"sample {row['n']} of policy {row['policy']}: {row['trained']} of {row['tokens']} tokens to train, "
            f"versions {row['oldest']} to {row['newest']}, reward {row['reward']:g}",
        )
        for row in rows
    ]


def _steps_of(reads: Snapshot, group: str) -> list[Step]:
    query = f"{_STEPS} WHERE b.id IN (SELECT batch FROM members WHERE grp = ?) ORDER BY b.leased_at"
    return [Step(*row) for row in reads.all(query, (group,))]


def _of_step(step: Step) -> list[Moment]:
    found = [Moment(step.begin, f"served to the trainer of {step.policy} in batch {step.batch}")]
    if step.at is not None:
        line = "" if step.line == "live" else f", which is {step.line}"
        found.append(Moment(step.at, f"trained into version {step.version} of {step.policy}{line}"))
    elif step.end is not None:
        found.append(Moment(step.end, f"batch {step.batch} {step.state}"))
    return found
