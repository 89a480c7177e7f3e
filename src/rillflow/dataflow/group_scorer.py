"""Asks a recipe's group reward about complete groups, several at once, beside the service's event loop.

Invariants: a completion is acknowledged before its group is scored, so only the trainer waits for a reward. The scores
are written once, in the transition that settles the group; after a crash before it the reward is asked again. A group
whose reward raised or took too long `dataflow.attempts` times has failed, with the error. The first error of each kind
is logged with its traceback.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from rillflow.clients.payloads import Arrays, DamagedRows, PayloadReader
from rillflow.config.tracebacks import UserErrors, located
from rillflow.contracts import Clock, GroupReward
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.ledger.scoring import UnscoredGroup
from rillflow.errors import RewardError, RillflowError
from rillflow.types import FinishedEpisode, LoseRows, Scored, Units

log = logging.getLogger(__name__)

AT_ONCE = 8
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between two tries

CarryOut = Callable[[Callable[[], object]], Awaitable[object]]


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
