"""Rewards of whole groups: which groups wait for theirs and what follows from it, and the scorer that asks for them.

`Scoring` is the ledger's part. Invariants: where a run has a group's reward, a complete group of which enough episodes
ended well is settled by `score` or `fail` alone. In that same transition the reward of each of its episodes becomes
what its node gave plus what the group's reward says. Episodes that are played again take their group back; what the
others were given by their nodes is kept, and the group is scored again when it is complete. An answer about episodes of
which one was played again since is dropped. It writes no table: `tasks` and `groups` do.

`GroupScorer` asks the recipe's reward about complete groups, several at once, beside the service's event loop.
Invariants: a completion is acknowledged before its group is scored, so only the trainer waits for a reward. The scores
are written once, in the transition that settles the group; after a crash before it the reward is asked again. A group
whose reward raised or took too long `dataflow.attempts` times has failed, with the error. The first error of each kind
is logged with its traceback.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rillflow.clients.payloads import Arrays, DamagedRows, PayloadReader
from rillflow.config.tracebacks import UserErrors, located
from rillflow.contracts import Clock, GroupReward
from rillflow.dataflow.ledger.attempts import LARGEST_REWARD
from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.groups import Groups
from rillflow.dataflow.ledger.tasks import FAILURES_IN_A_ROW, Tasks
from rillflow.errors import RewardError, RillflowError
from rillflow.types import EpisodeFacts, FinishedEpisode, LoseRows, Prompt, Row, Scored, Units

if TYPE_CHECKING:
    from rillflow.dataflow.ledger.ledger import Ledger

log = logging.getLogger(__name__)

REWARD_ERROR = "reward_error"
AT_ONCE = 8
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between two tries

CarryOut = Callable[[Callable[[], object]], Awaitable[object]]


@dataclass(frozen=True)
class ScoredEpisode:
    """An episode of a complete group. `row` has its transcript and answer; None if its rows are not kept."""

    place: int
    attempt: str
    facts: EpisodeFacts
    metrics: dict[str, float]
    given: float
    row: Row | None


@dataclass(frozen=True)
class UnscoredGroup:
    """A complete group that waits for its reward: its episodes that ended well, of the `planned` ones."""

    id: str
    prompt: Prompt
    planned: int
    episodes: list[ScoredEpisode]


class Scoring(Part):
    def __init__(self, base: Base, groups: Groups, tasks: Tasks) -> None:
        super().__init__(base)
        self._groups = groups
        self._tasks = tasks

    def open(self) -> None:
        """A run that was resumed without a group's reward goes on with what its nodes gave."""
        if not self._rules.group_reward:
            for group in self.waiting(-1):
                self._groups.settle(group)

    @property
    def count(self) -> int:
        """How many groups wait for their reward."""
        return int(self._db.value("SELECT count(*) FROM groups WHERE scoring = 1"))

    def waiting(self, most: int, without: Collection[str] = ()) -> list[str]:
        """Return the ids of groups that wait for their reward, the oldest first; -1 for all of them."""
        limit = most if most < 0 else most + len(without)
        ids = self._db.column("SELECT id FROM groups WHERE scoring = 1 ORDER BY lane, ord LIMIT ?", (limit,))
        found = [group for group in ids if group not in without]
        return found if most < 0 else found[:most]

    def group(self, group: str) -> UnscoredGroup | None:
        """Return the group, or None where it waits no more."""
        row = self._groups.row(group)
        if not row.scoring:
            return None
        prompt = self._groups.prompt(row.lane, row.ord, row.prompt)
        rows = self._transcripts(group)
        query = (
            "SELECT id, place, attempt, seed, seconds, metrics, given FROM tasks WHERE grp = ? AND state = 'done' "
            "ORDER BY place"
        )
        episodes = [
            ScoredEpisode(
                place=place,
                attempt=attempt,
                facts=EpisodeFacts(
                    task=task,
                    prompt=prompt.id,
                    policies=list(self._rules.policies),
                    seed=seed,
                    evaluating=row.lane == "eval",
                    seconds=seconds,
                ),
                metrics=json.loads(metrics),
                given=given,
                row=rows.get(place),
            )
            for task, place, attempt, seed, seconds, metrics, given in self._db.all(query, (group,))
        ]
        return UnscoredGroup(group, prompt, row.planned, episodes)

    def _transcripts(self, group: str) -> dict[int, Row]:
        """Return the row of each episode that has its transcript: see `rollout.push`."""
        found: dict[int, Row] = {}
        for place, unit, segment, offset, length in self._db.all(
            "SELECT place, unit, segment, offset, length FROM samples WHERE grp = ? AND live = 1 "
            "ORDER BY place, trained = 0, n",
            (group,),
        ):
            found.setdefault(place, Row(unit=unit, segment=segment, offset=offset, length=length))
        return found

    # ------------------------------------------------------------ endings

    def score(self, group: UnscoredGroup, rewards: Sequence[Scored]) -> bool:
        """Add what the group's reward says to each episode's, and settle the group; False where it is not as it was."""
        if not self._is_still(group):
            return False
        totals = [episode.given + reward for episode, reward in zip(group.episodes, rewards, strict=True)]
        if not all(abs(total) <= LARGEST_REWARD for total in totals):
            return self.fail(group, f"rewards {totals!r:.200}: not finite, or too large")
        for episode, reward, total in zip(group.episodes, rewards, totals, strict=True):
            metrics = episode.metrics | {f"reward/{label}": part for label, part in reward.parts.items()}
            self._tasks.reward(group.id, episode.place, total, metrics)
        self._db.clear_counter(FAILURES_IN_A_ROW)
        self._groups.settle(group.id, scored=True)
        return True

    def fail(self, group: UnscoredGroup, error: str) -> bool:
        """Fail the group's episodes, which have no reward; returns False if the group has changed."""
        if not self._is_still(group):
            return False
        episodes = [(episode.place, episode.attempt) for episode in group.episodes]
        self._tasks.fail_done(group.id, episodes, REWARD_ERROR, error)
        self._groups.settle(group.id)
        return True

    def _is_still(self, group: UnscoredGroup) -> bool:
        """Return whether the group waits for a reward of these very episodes."""
        now = self.group(group.id)
        return now is not None and [e.attempt for e in now.episodes] == [e.attempt for e in group.episodes]


# ------------------------------------------------------------ beside the event loop


class GroupScorer:
    """Scores the groups of one ledger. `carry_out` carries out a transition of it and returns when that is durable."""

    def __init__(
        self, ledger: Ledger, reward: GroupReward, token: str, *, seconds: float, carry_out: CarryOut, clock: Clock
    ) -> None:
        self._ledger = ledger
        self._reward = reward
        self._seconds = seconds
        self._carry_out = carry_out
        self._clock = clock
        self._reader = PayloadReader(self._units, token)
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._since: dict[str, float] = {}
        self._errors = UserErrors()
        self._closed = False

    async def _units(self) -> Units:
        return self._ledger.units()

    def look(self) -> None:
        """Begin to score groups that wait for it, as many as there is room for."""
        room = AT_ONCE - len(self._under_way)
        if self._closed or room < 1 or self._ledger.phase == "ended":
            return
        for group in self._ledger.scoring.waiting(room, self._under_way):
            self._since[group] = self._clock.monotonic()
            self._under_way[group] = asyncio.create_task(self._life(group), name=f"score-{group}")

    def waits(self) -> list[str]:
        """Return what the status says of groups whose reward takes its time."""
        if not self._since:
            return []
        longest = self._clock.monotonic() - min(self._since.values())
        return [f"the reward of {len(self._since)} groups is being computed, of one for {longest:.0f} s"]

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        await self._reader.close()

    # ------------------------------------------------------------ one group

    async def _life(self, group: str) -> None:
        try:
            await self._score(group)
        except Exception:
            log.exception("group %s could not be scored: it is tried again", group)
            await asyncio.sleep(FIRST_PAUSE)
        finally:
            del self._under_way[group], self._since[group]
            self.look()

    async def _score(self, name: str) -> None:
        tried, pause = 0, FIRST_PAUSE
        while (group := self._ledger.scoring.group(name)) is not None and self._ledger.phase != "ended":
            try:
                rewards = await self._ask(group)
            except DamagedRows as error:
                lost = LoseRows(rows=error.rows, reason=error.message)
                await self._write(partial(self._ledger.lose_rows, lost))
            except _Unread as error:  # a unit may come back; rows of one that does not are played again
                log.warning("group %s: %s", name, error)
            except Exception as error:
                tried += 1
                said = located(error)
                log.warning("group %s has no reward: %s%s", name, said, self._errors.note("group reward", error))
                await self._write(partial(self._ledger.note_errors, self._errors.take()))
                if tried >= self._ledger.rules.attempts:
                    await self._write(partial(self._ledger.fail_group, group, said))
                    return
            else:
                if len(group.episodes) < group.planned:
                    missing = group.planned - len(group.episodes)
                    log.info("group %s is rewarded without %d of its %d episodes", name, missing, group.planned)
                await self._write(partial(self._ledger.score_group, group, rewards))
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _ask(self, group: UnscoredGroup) -> Sequence[Scored]:
        episodes = await self._read(group)
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                return await self._reward.score(episodes)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise RewardError(f"the reward of the group took longer than {self._seconds:.0f} s") from error

    async def _read(self, group: UnscoredGroup) -> list[FinishedEpisode]:
        rows = [episode.row for episode in group.episodes if episode.row is not None]
        if len(rows) < len(group.episodes):
            raise RewardError("an episode has left nothing that a trainer keeps: its answer is gone", "see trains_on")
        try:
            found = await self._reader.read(rows, ["transcript", "answer"])
        except DamagedRows:
            raise
        except RillflowError as error:
            raise _Unread(error.message) from error
        return await asyncio.to_thread(_finished, group, found)

    async def _write(self, transition: Callable[[], object]) -> None:
        """Carry out a transition; a disk that refuses it is asked again, not the reward."""
        pause = FIRST_PAUSE
        while True:
            try:
                await self._carry_out(transition)
                return
            except RillflowError as error:
                log.error("a group's reward could not be written: %s", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


class _Unread(Exception):
    """No storage unit has said what the episodes left."""


def _finished(group: UnscoredGroup, found: Sequence[Arrays]) -> list[FinishedEpisode]:
    if not all("answer" in arrays for arrays in found):
        raise RewardError("an episode was played before the recipe had a reward of groups: its answer was not kept")
    return [
        FinishedEpisode(
            payload=group.prompt.payload,
            answer=json.loads(arrays["answer"].tobytes()),
            messages=[m for path in json.loads(arrays["transcript"].tobytes()) for m in path["messages"]],
            metrics=episode.metrics,
            episode=episode.facts,
            reward=episode.given,
        )
        for episode, arrays in zip(group.episodes, found, strict=True)
    ]
