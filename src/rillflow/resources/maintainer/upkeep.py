"""Brings the executor's nodes to the recorded state: failed starts, retirements, deaths, refills.

Every action may be repeated: after a kill, the next maintainer finds the same state and continues. A failed start is
repeated after a pause that doubles, and after `MOST_FAILURES` in a row only when a new report asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from rillflow.clients.dataflow import DataflowClient
from rillflow.config.runs import ScalingConfig, Tag
from rillflow.contracts import Clock, Executor
from rillflow.dataflow.balance import joined
from rillflow.errors import BadRequest, RunError, WireError
from rillflow.resources.maintainer.pool import Action, Asked, Book, Line, Member, Own, State, members, size
from rillflow.resources.placement import node_of
from rillflow.resources.workers import Worker, WorkersFile
from rillflow.types import NodeInfo, RetireNode
from rillflow.types.balance import Balance, Report

log = logging.getLogger(__name__)

MOST_FAILURES = 5
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0
MARGIN = 10.0  # seconds that a drained node has to exit
PREFIX = "auto-"


class Run(Protocol):
    """A run, as a maintainer reaches it. Every call has a deadline and raises WireError after it."""

    async def ended(self) -> bool: ...

    async def balance(self) -> Balance: ...

    async def nodes(self) -> list[NodeInfo]: ...

    async def retire(self, node: str, drain: float) -> None:
        """Retire a node. Repeating it, or naming a node that has gone, changes nothing."""


class Workers(Protocol):
    """The nodes that the run itself keeps alive and that only it can stop."""

    def playing(self) -> list[str]:
        """Return those that may be taken away: they have the tag `rollout` only."""

    def take(self, node: str) -> None:
        """Let the run drain and stop it."""

    def give(self, node: str) -> None:
        """Let the run start it again."""


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
    """The observations of one round. `running` comes from the executor."""

    time: float
    infos: Sequence[NodeInfo]
    running: dict[str, bool]
    report: Report | None

    def info(self, name: str) -> NodeInfo | None:
        return next((info for info in self.infos if info.name == name), None)


@dataclass
class Upkeep:
    """Carries out the state. A node has `start_timeout` seconds to join. `awaited` are nodes of the run that have not
    joined yet, with the end of the wait for each."""

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
        """Return the pool as observed, with the actions since."""
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

    # ------------------------------------------------------------ present nodes

    async def settle(self, look: Look) -> None:
        """Compare every node of the executor with its expected state."""
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
        """Adopt nodes that only the executor knows: the state was lost."""
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
        """Continue interrupted changes. A worker that was taken away and plays again was given back by another command,
        and no longer belongs to the maintainer."""
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
            await self._end(
                look, name, "failed", "it was not begun: the maintainer that wanted to start it was stopped"
            )
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
            # Not at our request: the operator wants fewer.
            self.state.target = max((self.state.target or 1) - 1, self.scaling.least)
            await self._end(look, name, "stopped", "it has left; another command has retired it")
        elif running is not True:
            await self._end(look, name, "died", "its process has ended", attempt=attempt)
        elif info is not None and info.state == "gone":
            await self._end(look, name, "died", "the run gets no heartbeats from it", attempt=attempt)

    async def _end(self, look: Look, name: str, action: Action, why: str, attempt: int | None = None) -> None:
        """Stop what is left of a node and remove it from the state. With `attempt` it counts as a failed start."""
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
        """Start the nodes that are missing to the target, including replacements of dead ones."""
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
        """End the nodes after the run ended at `since`: they exit, or are stopped. Return whether none is left."""
        for name in list(self.state.nodes):
            if look.running.get(name) is not True:
                await self._end(look, name, "stopped", "the run has ended")
            elif look.time - since >= grace:
                await self._end(look, name, "stopped", f"it had not left {grace:.0f} s after the run's end")
        return not self.state.nodes

    def _size(self, look: Look) -> int:
        return size(self.pool(look))


# ---------------------------------------------------------------- a run, reached through its service


_DEADLINE = 10.0


class ServiceRun:
    """The live service of a run."""

    def __init__(self, client: DataflowClient) -> None:
        self._client = client

    async def ended(self) -> bool:
        return (await self._client.status(_DEADLINE)).phase == "ended"

    async def balance(self) -> Balance:
        return joined((await self._client.balance(_DEADLINE)).ledgers)

    async def nodes(self) -> list[NodeInfo]:
        return (await self._client.nodes(_DEADLINE)).nodes

    async def retire(self, node: str, drain: float) -> None:
        try:
            await self._client.retire(RetireNode(node=node, drain=drain), _DEADLINE)
        except BadRequest:
            return  # no such node lives: it has gone already


class FileWorkers:
    """The run's own nodes, by RUN/workers.json; the run's supervisor carries out its changes."""

    def __init__(self, file: WorkersFile) -> None:
        self._file = file

    def playing(self) -> list[str]:
        if self._file.stamp() is None:
            return []
        return [node_of(w.name) for w in self._file.read() if w.tags == {"rollout"} and not w.lost]

    def take(self, node: str) -> None:
        self._change(node, lambda tags: tags - {"rollout"})

    def give(self, node: str) -> None:
        self._change(node, lambda tags: tags | {"rollout"})

    def _change(self, node: str, change: Callable[[frozenset[Tag]], frozenset[Tag]]) -> None:
        def changed(workers: list[Worker]) -> list[Worker]:
            return [
                msgspec.structs.replace(w, tags=frozenset(change(w.tags))) if node_of(w.name) == node else w
                for w in workers
            ]

        self._file.change(changed)
