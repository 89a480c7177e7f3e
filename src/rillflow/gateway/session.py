"""Sessions: the gateway's view of episodes.

A session's key opens only its own routes. It carries the session's id and a signature, so that a call with the key
of a session that is gone can be told so, and it is different each time an id is opened, so that a process left over
from an earlier attempt cannot write into a later one.

Every draw's seed depends on the session's seed and the prompt alone: on how often the same prompt was asked before
in this session, never on which call came first among different ones.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from itertools import count
from typing import NamedTuple

from rillflow.config import GatewayConfig
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import QueueFull, RunError
from rillflow.gateway.failures import CallRefused, session_gone, session_late
from rillflow.gateway.keeping import SessionLog, Unkept
from rillflow.gateway.record import SessionRecord
from rillflow.gateway.tree import TokenTree


class Draw(NamedTuple):
    """Which of the calls with the same prompt this is."""

    prompt: bytes
    number: int


@dataclass(slots=True)
class Session:
    """One episode's calls: a token tree for each policy, and what is at work now, with how to abandon it."""

    id: str
    key: str
    seed: int
    group: str
    deadline: float
    log: SessionLog = field(default_factory=Unkept)
    calls: int = 0
    closed: bool = False
    trees: dict[str, TokenTree] = field(default_factory=dict)
    at_work: dict[asyncio.Task[None], Callable[[], None]] = field(default_factory=dict)
    draws: dict[bytes, set[int]] = field(default_factory=dict)

    def tree(self, policy: str) -> TokenTree:
        return self.trees.setdefault(policy, TokenTree())

    def admit(self, limits: GatewayConfig, now: float) -> int:
        """Count a call in, or refuse it; returns its number."""
        if self.closed:
            raise session_gone(self.id)
        if now >= self.deadline:
            raise session_late(self.id)
        if len(self.at_work) >= limits.concurrent:
            raise QueueFull(f"session {self.id!r} already has {limits.concurrent} calls at work")
        if self.calls >= limits.calls:
            raise CallRefused(f"session {self.id!r} has made {limits.calls} calls", code="call_limit_exceeded")
        self.calls += 1
        return self.calls

    def draw(self, policy: str, prompt: list[int]) -> Draw:
        """The next draw from this prompt: the lowest number that no other call has."""
        digest = blake2b(array("q", prompt).tobytes(), key=policy.encode()[:64], digest_size=16).digest()
        taken = self.draws.setdefault(digest, set())
        number = next(number for number in count() if number not in taken)
        taken.add(number)
        return Draw(digest, number)

    def give_back(self, draw: Draw) -> None:
        """A call failed and nobody saw its answer: when it is tried again, it is the same draw."""
        self.draws[draw.prompt].discard(draw.number)

    def seeds(self, draw: Draw, choices: int, asked_seed: int | None) -> list[int]:
        """One seed for each choice. An agent's own seed makes equal requests equal, within this session."""
        which = f"draw {draw.number}" if asked_seed is None else f"seed {asked_seed}"
        head = blake2b(f"{self.seed}/{which}/".encode() + draw.prompt)
        return [_seed(head, index) for index in range(choices)]


def _seed(head: blake2b, index: int) -> int:
    state = head.copy()
    state.update(index.to_bytes(4, "little"))
    return int.from_bytes(state.digest()[:8], "little") >> 1


class Sessions:
    """The open sessions of one gateway."""

    def __init__(
        self,
        secret: str,
        limits: GatewayConfig | None = None,
        clock: Clock | None = None,
        log: SessionLog | None = None,
    ) -> None:
        self.limits = limits or GatewayConfig()
        self.log = log or Unkept()
        self.clock = clock or SystemClock()
        self._secret = secret.encode()
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, id: str, *, seed: int, group: str, deadline_seconds: float) -> str:
        """Begin a session; returns its key. Its calls end with its deadline, if it is not closed before."""
        if id in self._open:
            raise RunError(f"session {id!r} is already open", "use a new id for each attempt")
        if not id or "/" in id:
            raise RunError(f"{id!r} cannot name a session", "use a non-empty id without slashes")
        if len(self._open) >= self.limits.sessions:
            raise QueueFull(f"{self.limits.sessions} sessions are open", "close some first")
        name = f"{id}.{secrets.token_hex(8)}"
        key = f"{name}.{self._sign(name)}"
        session = Session(id, key, seed, group, self.clock.monotonic() + deadline_seconds, self.log)
        self._open[id] = session
        self.log.opened(session)
        return key

    def close(self, id: str) -> SessionRecord:
        """End a session: calls still at work are cut and what they sampled is abandoned."""
        session = self._open.pop(id, None)
        if session is None:
            raise session_gone(id)
        session.closed = True
        for task, abandon in session.at_work.items():
            abandon()
            task.cancel()
        return SessionRecord(session.id, session.calls, session.trees)

    def get(self, id: str) -> Session:
        session = self._open.get(id)
        if session is None:
            raise session_gone(id)
        return session

    def of_key(self, key: str) -> Session:
        """The session that `key` opens; refused as gone where the session was closed or opened again since."""
        name = self.name_in(key)
        session = self.get(name)
        if not hmac.compare_digest(session.key.encode(), key.encode()):
            raise session_gone(name)
        return session

    def name_in(self, key: str) -> str:
        """The id in a key that this gateway signed; empty for anything else."""
        name, _, signature = key.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(name).encode()):
            return ""
        return name.rpartition(".")[0]

    def _sign(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), sha256).hexdigest()
