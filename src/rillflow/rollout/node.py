"""The rollout node: lease tasks, play many episodes at once, follow the weights, renew leases.

Invariants: at most `episodes` episodes are played at once; tasks are leased only while a player is free and engines
serve every policy; an episode whose lease is lost is cancelled and pushes nothing. A node that leaves asks for no more
tasks, ends the episodes that it can within its deadline, and returns the other leases.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rillflow.clients.dataflow import DataflowClient
from rillflow.config.rollout import RolloutConfig
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import RillflowError, RunError
from rillflow.gateway.node_engines import NodeEngines
from rillflow.gateway.sessions.session import Session
from rillflow.rollout.episodes import Episodes
from rillflow.types import Heartbeat, HeartbeatReply, LeaseTasks, LeaveRun, new_attempt

log = logging.getLogger(__name__)

LEASE_WAIT = 2.0
# Between two questions while the engines have older weights than the trainer: soon at first, as most often they are
# about to be published; then less and less often.
SOON, PULL_WAIT = 0.02, 0.32
ROSTER_WAIT = 0.25  # of a question of a node whose engines pull by themselves: it tells what they served when it began
HEARTBEAT_EVERY = 2.0
GOODBYE = 10.0  # seconds that the last word of a node that leaves may take


class Departure:
    """The deadline of a node that leaves, because it was retired or its process was asked to stop. The earliest one
    counts; `on_change` is called when it changes."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock or SystemClock()
        self._at = math.inf

    @property
    def begun(self) -> bool:
        return self._at < math.inf

    @property
    def left(self) -> float:
        """Seconds left for running episodes; infinite for a node that stays."""
        return max(0.0, self._at - self._clock.monotonic())

    def within(self, seconds: float) -> None:
        at = self._clock.monotonic() + seconds
        if at < self._at:
            self._at = at
            self.on_change()


class Node:
    """One node. Its gateway, engines and episodes are given, started.

    A node that follows one that died has its `incarnation` if it continues sessions of it, so that it keeps their
    leases. A node without a supervisor ends when the service has not answered for `patience` seconds.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        limits: RolloutConfig,
        *,
        dataflow: DataflowClient,
        engines: NodeEngines,
        episodes: Episodes,
        departure: Departure | None = None,
        patience: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._incarnation = incarnation
        self._limits = limits
        self._dataflow = dataflow
        self._engines = engines
        self._episodes = episodes
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._heads: Mapping[str, int] = {}  # what the last answer said
        self._soon = SOON
        self._asking = new_attempt()  # of the question for tasks; the same until it is answered
        self._freed = asyncio.Event()
        self._beat_now = asyncio.Event()
        episodes.on_room = self.wake
        self._departure = departure or Departure()
        self._departure.on_change = self._leaves
        self._patience = patience
        self._clock = clock or SystemClock()
        self._answered = self._clock.monotonic()
        self._ended = False
        self._left = False

    def wake(self) -> None:
        """Look for tasks again: there may be room, or an agent asks for one."""
        self._freed.set()

    def _leaves(self) -> None:
        log.info("node %s leaves: it has %.0f s for %d episodes", self.name, self._departure.left, len(self._playing))
        self._beat_now.set()
        self.wake()

    async def run(self, going_on: Sequence[Session] = ()) -> None:
        """Play until the run has ended or the node has left. Episodes that still run are cancelled then; after a
        departure they are played elsewhere.

        `going_on` are sessions of the node before this one, named by the attempts that play them.
        """
        for session in going_on:
            log.info("session %s goes on", session.id)
            self._start(session.id, self._episodes.go_on(session))
        helpers = [
            asyncio.create_task(self._heartbeats(), name="heartbeats"),
            asyncio.create_task(self._engines.run(), name="engines"),
        ]
        try:
            while await self._lease_once():
                for helper in helpers:
                    if helper.done():
                        helper.result()
            self._left = self._departure.begun and not self._ended
            self._ended = not self._left
        finally:
            self._episodes.stopping = not (self._ended or self._left)
            tasks = [*helpers, *self._pulls.values(), *self._playing.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._left:
            await self._say_goodbye()

    # ------------------------------------------------------------ leaving

    async def _drain(self) -> bool:
        """Wait a moment without leasing; return False once no episode runs, or the deadline has passed."""
        if not self._playing or self._departure.left <= 0:
            return False
        self._freed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(HEARTBEAT_EVERY, self._departure.left)):
                await self._freed.wait()
        return not self._ended

    async def _say_goodbye(self) -> None:
        """Return the leases that this node still holds."""
        try:
            await self._dataflow.leave(LeaveRun(node=self.name, incarnation=self._incarnation), GOODBYE)
        except RillflowError as error:
            log.warning("left without a word, the leases run out by themselves: %s", error)
        else:
            log.info("node %s has left", self.name)

    # ------------------------------------------------------------ leasing

    async def _lease_once(self) -> bool:
        """Lease and start what there is room for; False once the run has ended or the node may go."""
        if self._departure.begun:
            return await self._drain()
        room, versions = self._episodes.room(len(self._playing)), self._engines.versions()
        if room <= 0 or versions is None:
            self._freed.clear()
            with suppress(TimeoutError):
                # Not `wait_for`, which may swallow a cancellation that comes together with the event (Python 3.11).
                async with asyncio.timeout(HEARTBEAT_EVERY if versions else PULL_WAIT):
                    await self._freed.wait()
            return not self._ended
        wanted = LeaseTasks(
            node=self.name,
            incarnation=self._incarnation,
            want=room,
            versions=versions,
            # The answer changes as soon as newer weights come: do not wait long meanwhile.
            wait=0.0 if self._behind(versions) else LEASE_WAIT if self._engines.own else ROSTER_WAIT,
            attempt=self._asking,
        )
        try:
            reply = await self._dataflow.lease_tasks(wanted)
        except RillflowError as error:
            if error.status < 500:  # our own mistake (the token, the request): asking again would not mend it
                raise
            log.warning("no tasks: %s", error)
            await asyncio.sleep(LEASE_WAIT)
            return True
        self._answered = self._clock.monotonic()
        self._asking = new_attempt()
        if reply.phase == "ended":
            self._ended = True
            return False
        for lease in reply.leases:
            self._start(lease.attempt, self._episodes.play(lease))
        await asyncio.sleep(0)  # each has begun before the next question: its agent's hand is no longer free
        self._heads = reply.heads
        self._catch_up()
        if not reply.leases and self._behind(versions):
            await self._engines.newer(versions, self._soon)
            self._soon = min(2 * self._soon, PULL_WAIT)
        else:
            self._soon = SOON
        return True

    def _behind(self, versions: Mapping[str, int]) -> bool:
        """Also while anything is pulled: after a rollback it is older than what is served."""
        return bool(self._pulls) or any(
            self._heads.get(policy, version) > version for policy, version in versions.items()
        )

    def _catch_up(self) -> None:
        """Pull newer weights, each policy in its own task, so that a slow one delays no other."""
        for policy in self._engines.behind(self._heads):
            if policy not in self._pulls:
                self._pulls[policy] = asyncio.create_task(self._pull(policy), name=f"pull-{policy}")

    async def _pull(self, policy: str) -> None:
        try:
            await self._engines.refresh(policy)
        finally:
            del self._pulls[policy]

    # ------------------------------------------------------------ what is under way

    def _start(self, attempt: str, life: Coroutine[Any, Any, bool]) -> None:
        self._playing[attempt] = asyncio.create_task(self._play(attempt, life), name=attempt)

    async def _play(self, attempt: str, life: Coroutine[Any, Any, bool]) -> None:
        try:
            if await life:
                self._engines.manager.episode_finished()
        finally:
            self._playing.pop(attempt, None)
            self.wake()

    async def _heartbeats(self) -> None:
        """Renew the leases; stop playing what was taken away."""
        while True:
            try:
                reply = await self._dataflow.heartbeat(self._beat(), HEARTBEAT_EVERY * 4)
            except RillflowError as error:
                log.warning("heartbeat not taken: %s", error)
                self._check_patience()
            else:
                self._heard(reply)
            self._beat_now.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_EVERY):
                    await self._beat_now.wait()

    def _heard(self, reply: HeartbeatReply) -> None:
        self._answered = self._clock.monotonic()
        self._ended = reply.phase == "ended"
        for attempt in reply.lost:
            if attempt in self._playing:
                self._playing[attempt].cancel()
        if reply.leave is not None:
            self._departure.within(reply.leave)

    def _check_patience(self) -> None:
        silent = self._clock.monotonic() - self._answered
        if self._patience is not None and silent > self._patience:
            raise RunError(
                f"the run's service has not answered for {silent:.0f} s", "is the run over? join again when it is back"
            )

    def _beat(self) -> Heartbeat:
        under_way, waiting = len(self._playing), self._episodes.waiting
        stats = {
            "episodes_finished": float(self._episodes.finished),
            "episodes_running": float(under_way - waiting),
            "episodes_unrewarded": float(waiting),
        }
        return Heartbeat(
            node=self.name,
            incarnation=self._incarnation,
            attempts=list(self._playing),
            versions=self._engines.versions() or {},
            # An episode that waits for its reward holds a task, but is not played.
            capacity=self._limits.episodes + waiting,
            stats=stats | {name: value for name, value in self._engines.stats().items() if math.isfinite(value)},
            active="train" if self._episodes.resting else "rollout",
            leaving=self._departure.begun,
            trouble=self._engines.trouble,
        )
