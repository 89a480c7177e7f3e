"""Keeps the executor's nodes as the state says: starts that do not come to anything, retirements, deaths, refills.

Everything here may be done again: a maintainer that was killed in the middle is followed by one that finds the same
state and goes on. A start that fails is tried again after a pause that doubles, and after `MOST_FAILURES` in a row only
when a new report asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rillflow.config.resources import ScalingConfig
from rillflow.contracts import Clock, Executor
from rillflow.dataflow.balance import Balance, Report
from rillflow.errors import RunError, WireError
from rillflow.resources.maintainer.pool import Member, members, size
from rillflow.resources.maintainer.state import Action, Asked, Book, Line, Own, State
from rillflow.types import NodeInfo

log = logging.getLogger(__name__)

MOST_FAILURES = 5
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0
MARGIN = 10.0  # seconds that a drained node has to go by itself
PREFIX = "auto-"


class Run(Protocol):
    """A run, as a maintainer reaches it. Every call has a deadline and raises WireError after it."""

    async def ended(self) -> bool: ...

    async def balance(self) -> Balance: ...

    async def nodes(self) -> list[NodeInfo]: ...

    async def retire(self, node: str, drain: float) -> None:
        """Asking again changes nothing, nor does asking for a node that has gone."""


class Workers(Protocol):
    """The nodes that the run itself keeps alive and that only it can end."""

    def playing(self) -> list[str]:
        """Those that may be taken away: they carry `rollout` and nothing else."""

    def take(self, node: str) -> None:
        """Have the run drain and end it."""

    def give(self, node: str) -> None:
        """Have the run start it again."""


class NoWorkers:
    """For a run whose own nodes are out of reach."""

    def playing(self) -> list[str]:
        return []

    def take(self, node: str) -> None:
        raise RunError(f"{node} is not a node of the run's own", "retire it by hand: rillflow retire")

    def give(self, node: str) -> None:
        raise RunError(f"{node} is not a node of the run's own", "start it by hand: rillflow rollout --join")


@dataclass(frozen=True)
class Look:
    """What a round goes by. `running` is the executor's word."""

    time: float
    infos: Sequence[NodeInfo]
    running: dict[str, bool]
    report: Report | None

    def info(self, name: str) -> NodeInfo | None:
        return next((info for info in self.infos if info.name == name), None)


@dataclass
class Upkeep:
    """`start_timeout` is how long a node has to join. `awaited` are nodes of the run's own that are on their way, and
    until when they are waited for."""

    book: Book
    run: Run
    executor: Executor
    scaling: ScalingConfig
    clock: Clock
    start_timeout: float
    workers: Workers = field(default_factory=NoWorkers)
    say: Callable[[Line], None] = lambda line: None
    awaited: dict[str, float] = field(default_factory=dict)

    @property
    def state(self) -> State:
        return self.book.state

    def pool(self, look: Look) -> list[Member]:
        """As of the look, and of what was done since."""
        healthy = {info.name for info in look.infos if info.state == "healthy"}
        self.awaited = {n: end for n, end in self.awaited.items() if n not in healthy and end > look.time}
        return members(self.state, look.infos, look.report, self.workers.playing(), self.awaited)

    def note(
        self,
        action: Action,
        why: str,
        pool_size: int,
        nodes: Sequence[str] = (),
        *,
        asked: Asked = Asked(),
        by: str = "loop",
    ) -> None:
        """Commit the state with a line that says what was done."""
        line = Line(
            number=self.state.lines,
            time=self.clock.now(),
            action=action,
            why=why,
            size=pool_size,
            wanted=self.state.target,
            version=asked.version,
            branch=asked.branch,
            target=asked.target,
            nodes=list(nodes),
            by=by,
            dry_run=self.scaling.dry_run,
        )
        self.book.commit(line)
        log.info("%s: %s%s", action, why, f" ({', '.join(line.nodes)})" if line.nodes else "")
        self.say(line)

    def clamped(self, nodes: int) -> int:
        return max(self.scaling.least, min(nodes, self.scaling.most))

    # ------------------------------------------------------------ nodes that are there

    async def settle(self, look: Look) -> None:
        """See what became of every node of the executor's."""
        self._adopt(look)
        self._follow_workers(look)
        for name, own in list(self.state.nodes.items()):
            try:
                if own.leaving is not None:
                    await self._leaving(look, name, own.leaving)
                elif own.joined is None:
                    await self._starting(look, name, own)
                else:
                    await self._joined(look, name, own.joined)
            except (RunError, WireError) as error:
                log.warning("%s: %s; tried again in the next round", name, error)

    def _adopt(self, look: Look) -> None:
        """Nodes that the executor has and the state has not: the state was lost."""
        found = [name for name in look.running if name not in self.state.nodes]
        if not found:
            return
        for name in found:
            self.state.nodes[name] = Own(since=look.time)
            number = name.removeprefix(PREFIX)
            if number.isdecimal():
                self.state.number = max(self.state.number, int(number) + 1)
        self.note(
            "start", "adopted: the executor has them, this maintainer did not know", self._size(look), nodes=found
        )

    def _follow_workers(self, look: Look) -> None:
        """Carry on with what was cut short. A worker that was taken away and plays again later was given back by
        somebody else: it is theirs."""
        playing, since = set(self.workers.playing()), self.state.changed or 0.0
        for name in [name for name in self.state.released if name in playing]:
            if look.time - since <= self.scaling.drain:
                self.workers.take(name)
            else:
                self.state.released.remove(name)
                self.book.commit()

    async def _leaving(self, look: Look, name: str, until: float) -> None:
        info = look.info(name)
        if info is None or info.state != "healthy" or look.running.get(name) is not True:
            await self._end(look, name, "stopped", "it was drained and has left")
        elif look.time >= until:
            await self._end(look, name, "stopped", f"it did not leave within {self.scaling.drain:.0f} s")
        elif not info.leaving:
            await self.run.retire(name, max(until - MARGIN - look.time, 0.0))

    async def _starting(self, look: Look, name: str, own: Own) -> None:
        info, running = look.info(name), look.running.get(name)
        if running is None:
            await self._end(look, name, "failed", "it was not begun: whoever wanted to start it was stopped")
        elif info is not None and info.state == "healthy" and info.versions and running:
            own.joined = look.time
            self.state.failures = 0
            self.note("joined", f"after {look.time - own.since:.0f} s", self._size(look), [name])
        elif not running:
            await self._end(look, name, "failed", "it ended before it joined: see its log", attempt=own.attempt)
        elif look.time - own.since > self.start_timeout:
            why = f"it did not join within {self.start_timeout:.0f} s (runtime.start_timeout): see its log"
            await self._end(look, name, "failed", why, attempt=own.attempt)

    async def _joined(self, look: Look, name: str, joined: float) -> None:
        info, running = look.info(name), look.running.get(name)
        attempt = self.state.nodes[name].attempt if look.time - joined < self.start_timeout else None
        if info is not None and info.state == "left":
            # Not at our word: somebody wants fewer.
            self.state.target = max((self.state.target or 1) - 1, self.scaling.least)
            await self._end(look, name, "stopped", "it has left; somebody else has retired it")
        elif running is not True:
            await self._end(look, name, "died", "its process has ended", attempt=attempt)
        elif info is not None and info.state == "gone":
            await self._end(look, name, "died", "the run does not hear of it any more", attempt=attempt)

    async def _end(self, look: Look, name: str, action: Action, why: str, attempt: int | None = None) -> None:
        """Whatever is left of it goes, and it is forgotten. `attempt`: it counts as a start that failed."""
        await self.executor.stop(name)
        del self.state.nodes[name]
        if attempt is not None:
            why += self._failed(look.time, attempt + 1)
        self.note(action, why, self._size(look), [name])

    def _failed(self, now: float, failures: int) -> str:
        self.state.failures = failures
        if failures >= MOST_FAILURES:
            return f"; {failures} starts in a row have failed: no more until a report asks for it"
        pause = min(FIRST_PAUSE * 2 ** (failures - 1), LONGEST_PAUSE)
        self.state.retry = now + pause
        return f"; tried again in {pause:.0f} s"

    # ------------------------------------------------------------ nodes that are missing

    async def refill(self, look: Look) -> None:
        """Start what is missing to the target: new nodes, and those in the place of others that died."""
        missing = self.clamped(self.state.target or 0) - self._size(look)
        for name in self.state.released[: max(missing, 0)]:
            self._give_back(look, name)
            missing -= 1
        if missing <= 0 or look.time < self.state.retry or self.state.failures >= MOST_FAILURES:
            return
        # After a failure one at a time, until one has joined.
        for _ in range(1 if self.state.failures else missing):
            if self.state.failures and self.state.starting:
                return
            await self._start(look)

    def _give_back(self, look: Look, name: str) -> None:
        self.workers.give(name)
        self.state.released.remove(name)
        self.awaited[name] = look.time + self.start_timeout
        self.note("start", "a node of the run's own comes back", self._size(look), [name])

    async def _start(self, look: Look) -> None:
        name = f"{PREFIX}{self.state.number}"
        attempt = self.state.failures
        self.state.number += 1
        self.state.nodes[name] = Own(since=look.time, attempt=attempt)
        self.note("start", f"{self.scaling.executor} executor", self._size(look), [name])
        try:
            await self.executor.start(name)
        except RunError as error:
            await self._end(look, name, "failed", error.message, attempt=attempt)

    # ------------------------------------------------------------ the end

    async def finish(self, look: Look, since: float, grace: float) -> bool:
        """The run has ended at `since`: nodes see that themselves; who does not is stopped. True once none is left."""
        for name in list(self.state.nodes):
            if look.running.get(name) is not True:
                await self._end(look, name, "stopped", "the run has ended")
            elif look.time - since >= grace:
                await self._end(look, name, "stopped", f"it had not left {grace:.0f} s after the run's end")
        return not self.state.nodes

    def _size(self, look: Look) -> int:
        return size(self.pool(look))
