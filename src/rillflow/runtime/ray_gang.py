"""Processes that live and die together on a cluster: the ranks of a trainer, or one process alone.

A gang is supervised like a local process, with the same rules of restart. Its seats are placed together, at every
start. If one member is lost, all end within seconds and restart. The loss of a Ray node does not count as a death: the
gang is placed again wherever resources are free.

The output of members is copied to their logs here, in order and once, however often they are placed. A gang that waits
for resources says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rillflow.errors import RunError
from rillflow.resources.ray_cluster import SeatLost, Wants, describe
from rillflow.runtime.process import HOST_ENV, STOPPED
from rillflow.runtime.supervisor import ProcessSpec, Supervised
from rillflow.trainer.parallel.launch import LEFT_ALONE

log = logging.getLogger(__name__)

_LOOK = 0.5
_LAST_WORDS = 3.0  # for ranks to notice that one has gone, and say so
_NODE_NEWS = 5.0  # for Ray to notice that a node has gone, when an actor of it has
_SILENCE = 60.0  # seconds without an answer after which an actor is given up
_SAY_AGAIN = 60.0
_KILLED = -signal.SIGKILL.value


class Seat(Protocol):
    """The place of one process; `resources.ray_cluster.RoleHost` has its methods."""

    node: str
    address: str
    pid: int

    async def call(self, method: str, *arguments: str | float) -> Any: ...

    def tell(self, method: str, *arguments: str | float) -> None: ...


class Cluster(Protocol):
    async def place(
        self, names: Sequence[str], wants: Sequence[Wants], still: Callable[[float], bool]
    ) -> Sequence[Seat]: ...

    async def leave(self, seats: Sequence[Any]) -> None: ...

    async def is_alive(self, node: str) -> bool: ...

    async def offers(self) -> object: ...


@dataclass(frozen=True)
class Place:
    """A member's place: its host's address, and the ranks' rendezvous."""

    address: str
    rendezvous: str


@dataclass(frozen=True)
class Member:
    """One process of a gang, by its name on its host: `rillflow` with the arguments for where it is placed."""

    name: str
    wants: Wants
    log: Path
    arguments: Callable[[Place], Sequence[str]]


class Room:
    """How long workers of a kind wait for resources: without limit while one of them has a seat, else for `seconds`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._seated = 0
        self._since: float | None = None  # none of them has a seat

    def seated(self, change: int) -> None:
        self._seated += change
        self._since = None

    def is_over(self) -> bool:
        """Return whether the wait is over; call it repeatedly."""
        if self._seated:
            return False
        if self._since is None:
            self._since = self._clock()
        return self._clock() - self._since > self._seconds


@dataclass
class _Life:
    """A member's present process, and the read position in its output."""

    member: Member
    seat: Seat
    read: dict[str, int]  # of each log of this member, wherever it was
    log: str = ""
    code: int | None = None
    heard: float = field(default_factory=time.monotonic)
    lost: str = ""

    async def look(self) -> None:
        """Copy its new output to the log, and note its exit code."""
        more = True
        while more and not self.lost:
            try:
                answer = json.loads(await self.seat.call("look", self.log, self.read.get(self.log, 0)))
            except TimeoutError:
                if time.monotonic() - self.heard > _SILENCE:
                    self.lost = f"its actor has not answered for {_SILENCE:.0f} s"
                return
            except SeatLost as error:
                self.lost = str(error) or "its actor has gone"
                return
            self.heard = time.monotonic()
            more = self._take(answer)

    def _take(self, answer: dict[str, Any]) -> bool:
        """Copy one piece of output; return whether more can be read at once."""
        if answer["log"] != self.log and answer["log"] in self.read:
            self.log = answer["log"]  # this member was here before: go on where its log had been read to
            return True
        self.log = answer["log"]
        self.read[self.log] = answer["offset"]
        if answer["text"]:
            with open(self.member.log, "ab") as output:
                output.write(answer["text"].encode("latin-1"))
        if not answer["more"]:
            self.code = answer["code"]
        return bool(answer["more"])

    @property
    def over(self) -> bool:
        return self.code is not None or bool(self.lost)


class Gang(Supervised):
    """Members that are placed, started and ended together."""

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        cluster: Cluster,
        *,
        environment: dict[str, str],
        restarts: int,
        room: Room,
    ) -> None:
        super().__init__(ProcessSpec(name, ()), members[0].log, restarts, threads=0)
        self._members = members
        self._cluster = cluster
        self._environment = environment
        self._room = room
        self._lives: list[_Life] = []
        self._read: list[dict[str, int]] = [{} for _ in members]
        self._asked_to_stop = False
        self._collecting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The pid of the first member, on its own host; None while it has no seat."""
        return self._lives[0].seat.pid if self._lives else None

    def signal(self, number: signal.Signals) -> None:
        self._asked_to_stop |= number == signal.SIGTERM
        for life in self._lives:
            if not life.over:
                life.seat.tell("signal", int(number))

    async def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._lives:
            await self._collect()
            if all(life.over or not life.seat.pid for life in self._lives):  # ended, or never started
                await self._leave()
            elif time.monotonic() > deadline:
                return False
            else:
                await asyncio.sleep(0.1)
        return True

    async def _run_once(self) -> int:
        """Run the gang until it ends. If the loss of a node was the cause, it is placed again."""
        while True:
            self.starts += 1
            self._since = time.monotonic()
            self._asked_to_stop = False
            nodes: Sequence[str] = ()
            try:
                if not await self._seat():
                    return STOPPED
                await self._start()
                code = await self._watch()
            except SeatLost as error:  # before all were started
                log.warning("%s: %s", self.spec.name, error)
                code, nodes = _KILLED, error.nodes
            except TimeoutError:
                log.warning("%s: an actor did not come up in time", self.spec.name)
                code = _KILLED
            except RunError:
                await self._leave()
                raise
            if code == 0:
                await self._forget()
            lost = nodes or [life.seat.node for life in self._lives if life.lost]
            by_node = await self._has_gone(lost)
            await self._leave()
            if not by_node or not self.keep_alive:
                return code
            log.warning("%s: a node it was on has gone: placing it again", self.spec.name)

    async def _seat(self) -> bool:
        """Wait for seats; return False if the gang is stopped meanwhile."""
        names, wants = [m.name for m in self._members], [m.wants for m in self._members]
        said = 0.0

        def still(waited: float) -> bool:
            nonlocal said
            if waited - said > (_SAY_AGAIN if said else 5.0):
                said = waited
                log.warning("%s waits for room in the cluster: it wants %s", self.spec.name, self._wants())
            return self._wanted() and not self._room.is_over()

        seats = await self._cluster.place(names, wants, still)
        if seats:
            self._lives = [_Life(*each) for each in zip(self._members, seats, self._read, strict=True)]
            self._room.seated(1)
            return True
        if self._wanted():
            raise RunError(
                f"the cluster has no room for {self.spec.name}: it wants {self._wants()}; "
                f"nodes have: {await self._cluster.offers()}",
                "add nodes, offer tags (ray start --resources), or give it more time (runtime.start_timeout)",
            )
        return False

    def _wants(self) -> str:
        each = describe(self._members[0].wants)
        return each if len(self._members) == 1 else f"{len(self._members)} times {each}"

    async def _start(self) -> None:
        first = self._lives[0].seat
        rendezvous = ""
        if len(self._lives) > 1:
            rendezvous = f"{first.address}:{await first.call('free_port', first.address)}"
        for life in self._lives:
            place = Place(life.seat.address, rendezvous)
            spec = {
                "arguments": list(life.member.arguments(place)),
                "environment": self._environment | {HOST_ENV: place.address},
                "cwd": os.getcwd(),
            }
            life.seat.pid = await life.seat.call("start", json.dumps(spec))
        places = ", ".join(f"{life.member.name} at {life.seat.address}" for life in self._lives)
        log.info("placed %s", places)

    async def _watch(self) -> int:
        while True:
            await self._collect()
            codes = [life.code for life in self._lives]
            if all(code == 0 for code in codes):
                return 0
            if all(life.over for life in self._lives) or (not self._asked_to_stop and self._dead()):
                return await self._cause()
            await asyncio.sleep(_LOOK)

    def _dead(self) -> list[_Life]:
        """Return the members that ended with an error."""
        return [life for life in self._lives if life.lost or life.code]

    async def _cause(self) -> int:
        """Return the cause of the gang's end: the first member that failed, once the others have had time to end."""
        deadline, dead = time.monotonic() + _LAST_WORDS, self._dead()
        while time.monotonic() < deadline and not all(life.over for life in self._lives):
            await asyncio.sleep(0.1)
            await self._collect()
            dead += [life for life in self._dead() if life not in dead]
        culprit = next((life for life in dead if life.lost or life.code != LEFT_ALONE), dead[0])
        self.log_path = culprit.member.log
        if not self._asked_to_stop:
            why = culprit.lost or f"ended with code {culprit.code}"
            others = f"; all of {self.spec.name} end, to restart" if len(self._lives) > 1 else ""
            log.warning("%s: %s%s", culprit.member.name, why, others)
        return culprit.code or _KILLED

    async def _has_gone(self, nodes: Sequence[str]) -> bool:
        """Return whether a node has gone; Ray notices that some seconds after the loss of its actors."""
        deadline = time.monotonic() + _NODE_NEWS
        while nodes and time.monotonic() < deadline:
            for node in nodes:
                if not await self._cluster.is_alive(node):
                    return True
            await asyncio.sleep(_LOOK)
        return False

    async def _collect(self) -> None:
        async with self._collecting:
            await asyncio.gather(*(life.look() for life in self._lives if not life.over))

    async def _forget(self) -> None:
        for life in self._lives:
            with suppress(SeatLost, TimeoutError):
                await life.seat.call("forget")

    async def _leave(self) -> None:
        lives, self._lives = self._lives, []
        if lives:
            self._room.seated(-1)
            await self._cluster.leave([life.seat for life in lives])
