"""Sessions: the gateway's view of episodes.

A session's key opens only its own routes. It holds the session's id and a signature, so that a call with the key of a
closed session gets the right error. It is different each time an id is opened, so that a process left over from an
earlier attempt cannot write into a later one.

The seed of a draw depends on the session's seed, the prompt, and how often that prompt was asked before in this
session. It does not depend on the order of calls with different prompts.

With a log, a session survives the process: everything that an agent gets is in the log before.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from rillflow.config import GatewayConfig
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import QueueFull, RunError
from rillflow.gateway.sessions.events import Asked, NoSessionLog, SessionLog
from rillflow.gateway.sessions.rewards import Rewards
from rillflow.gateway.shapes import CallRefused, session_gone, session_late
from rillflow.gateway.trees.record import SessionRecord
from rillflow.gateway.trees.tree import Node, TokenTree

LINGER = 600.0  # seconds that a session is kept after its deadline if it is not closed
_GIVEN_BYTES, _SAMPLED_BYTES = 4, 16  # for each token: its id; for a sampled one also two log-probs and a version


class Numbers:
    """Numbers the nodes of a session. `next` is set when nodes are restored."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        self.next += 1
        return self.next - 1


class Draw(NamedTuple):
    """The number of a call among those with the same prompt."""

    prompt: bytes
    number: int


@dataclass(slots=True)
class Session:
    """The calls of one episode: a token tree for each policy, and the running calls.

    `at_work` maps the task of each running call to the function that abandons it. Calls that hold one of the `places`
    are sampled; the others wait in order. A call holds the session's `turn` while its text is processed. `deadline` is
    on the monotonic clock, `until` is the same moment on the wall clock. `detail` belongs to the code that opened the
    session. `held` is the number of bytes that the session keeps. `incomplete` says what is missing and why; it is
    empty if every token that an agent may have seen is here.

    Counters: `rewards_refused`: rewards that were sent without the right to; `sampling_overruled`: calls whose sampling
    parameters the recipe replaced; `unparsed_calls`: texts that look like tool calls but cannot be parsed; `faults`:
    calls that failed because of the engine or the disk.
    """

    id: str
    key: str
    seed: int
    group: str
    deadline: float
    until: float = 0.0
    linger: float = LINGER
    log: SessionLog = field(default_factory=NoSessionLog)
    detail: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 0
    closed: bool = False
    incomplete: str = ""
    held: int = 0
    rewards_refused: int = 0
    sampling_overruled: int = 0
    unparsed_calls: int = 0
    faults: int = 0
    trees: dict[str, TokenTree] = field(default_factory=dict)
    at_work: dict[asyncio.Task[None], Callable[[], None]] = field(default_factory=dict)
    draws: dict[bytes, set[int]] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=Numbers)
    places: asyncio.Semaphore = field(default_factory=asyncio.Semaphore)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    rewards: Rewards = field(init=False)
    _counted: int = -1

    def __post_init__(self) -> None:
        self.rewards = Rewards(self.trees)

    @property
    def name(self) -> str:
        """The key without its signature. It differs between the openings of one id, and opens nothing."""
        return self.key.rpartition(".")[0]

    def tree(self, policy: str) -> TokenTree:
        if policy not in self.trees:
            self.trees[policy] = TokenTree(self.numbers)
        return self.trees[policy]

    def admit(self, limits: GatewayConfig, now: float) -> int:
        """Count a call and return its number, or refuse it."""
        if self.closed:
            raise session_gone(self.id)
        if now >= self.deadline:
            raise session_late(self.id)
        if len(self.at_work) >= limits.concurrent + limits.waiting:
            raise QueueFull(
                f"session {self.id!r} already has {limits.concurrent} running and {limits.waiting} waiting calls"
            )
        if self.calls >= limits.calls:
            raise CallRefused(f"session {self.id!r} has made {limits.calls} calls", code="call_limit_exceeded")
        if self.held >= limits.session_bytes:
            raise CallRefused(
                f"session {self.id!r} holds its limit of {limits.session_bytes} bytes",
                code="session_limit_exceeded",
            )
        self.calls += 1
        return self.calls

    def record(self) -> SessionRecord:
        return SessionRecord(self.id, self.calls, self.trees, rewards=self.rewards, incomplete=self.incomplete)

    # ------------------------------------------------------------ events for its log

    def begun(self, asked: Asked, nodes: Sequence[Node]) -> None:
        """Log that the answers of a call, one for each node, are about to be sampled."""
        self.log.begun(self, asked, nodes)

    async def shown(self, asked: Asked) -> None:
        """Return once the agent may see the first token of a live call."""
        await self.log.shown(self, asked)

    async def ended(self, asked: Asked, node: Node) -> None:
        """Return once the answer is on disk, so that the agent may see its end."""
        self.count(node)
        await self.log.ended(self, asked, node)

    def abandoned(self, asked: Asked, nodes: Sequence[Node]) -> None:
        """Log that a call has failed; its nodes were abandoned unless a later call continued from them."""
        for node in nodes:
            if node.finish in {None, "abort"}:
                self.count(node)
        self.log.abandoned(self, asked, nodes)

    async def reward(
        self,
        value: float,
        *,
        call: str | None = None,
        turn: int | None = None,
        leaf: int | None = None,
        policy: str | None = None,
    ) -> None:
        """Give a reward (see `Rewards.give`); return once it is on disk."""
        self.rewards.give(value, call=call, turn=turn, leaf=leaf, policy=policy)
        self.log.rewarded(self)
        await self.log.synced()

    def count_unparsed(self, texts: int) -> None:
        """Count texts of an answer that look like tool calls but cannot be parsed."""
        self.unparsed_calls += texts

    def count(self, node: Node) -> None:
        """Count the bytes of a node. A given node, which calls may share, is counted once."""
        if node.kind != "given" or node.id > self._counted:
            self.held += size_of(node)
        if node.kind == "given":
            self._counted = max(self._counted, node.id)

    # ------------------------------------------------------------ draws

    def draw(self, policy: str, prompt: Sequence[int]) -> Draw:
        """Return the next draw from this prompt: the lowest number that no other call has."""
        digest = prompt_digest(policy, prompt)
        taken = self.draws.setdefault(digest, set())
        number = next(number for number in count() if number not in taken)
        taken.add(number)
        return Draw(digest, number)

    def give_back(self, draw: Draw) -> None:
        """Give back the draw of a call that failed unseen, so that its retry is the same draw."""
        self.draws[draw.prompt].discard(draw.number)

    def seeds(self, draw: Draw, choices: int, asked_seed: int | None) -> list[int]:
        """Return one seed for each choice. With an agent's own seed, equal requests in a session get equal answers."""
        which = f"draw {draw.number}" if asked_seed is None else f"seed {asked_seed}"
        head = blake2b(f"{self.seed}/{which}/".encode() + draw.prompt)
        return [_seed(head, index) for index in range(choices)]


def prompt_digest(policy: str, prompt: Sequence[int]) -> bytes:
    return blake2b(np.asarray(prompt, np.int64).tobytes(), key=policy.encode()[:64], digest_size=16).digest()


def size_of(node: Node) -> int:
    """Return the bytes of a node: its tokens and messages."""
    each = _SAMPLED_BYTES if node.kind == "sampled" else _GIVEN_BYTES
    return each * len(node.tokens) + sum(message.size for message in node.messages)


def _seed(head: blake2b, index: int) -> int:
    state = head.copy()
    state.update(index.to_bytes(4, "little"))
    return int.from_bytes(state.digest()[:8], "little") >> 1


class Sessions:
    """The open sessions of one gateway, and closed ones whose log is still needed."""

    def __init__(
        self,
        secret: str,
        limits: GatewayConfig | None = None,
        clock: Clock | None = None,
        log: SessionLog | None = None,
    ) -> None:
        self.limits = limits or GatewayConfig()
        self.log = log or NoSessionLog()
        self.clock = clock or SystemClock()
        self._secret = secret.encode()
        self._open: dict[str, Session] = {}
        self._names: dict[str, str] = {}  # the ids of open sessions by their keys
        self._kept: dict[str, Session] = {}
        self._leaving: list[tuple[float, str, str]] = []  # a heap: when, id, key

    def __len__(self) -> int:
        return len(self._open)

    def restore(self) -> list[Session]:
        """Return the sessions of the log, open again. Those past their deadline and `linger` are closed."""
        restored = []
        for session in self.log.restore():
            session.key = self._signed(session.name)
            session.deadline = self.clock.monotonic() + session.until - self.clock.now()
            if session.deadline + session.linger <= self.clock.monotonic():
                self.log.closed(session)
            else:
                self._add(session)
                restored.append(session)
        return restored

    def open(
        self,
        id: str,
        *,
        seed: int,
        group: str,
        deadline_seconds: float,
        detail: Mapping[str, Any] | None = None,
        linger: float = LINGER,
    ) -> str:
        """Open a session and return its key. Its calls end with its deadline, unless it is closed before.

        `detail` is JSON that is restored with the session. A session that is not closed is removed `linger` seconds
        after its deadline.
        """
        self._sweep()
        if id in self._open:
            raise RunError(f"session {id!r} is already open", "use a new id for each attempt")
        if not id or "/" in id:
            raise RunError(f"{id!r} cannot be the id of a session", "use a non-empty id without slashes")
        if len(self._open) >= self.limits.sessions:
            raise QueueFull(f"{self.limits.sessions} sessions are open", "close some first")
        self.forget(id)
        session = Session(
            id,
            self._signed(f"{id}.{secrets.token_hex(8)}"),
            seed,
            group,
            self.clock.monotonic() + deadline_seconds,
            until=self.clock.now() + deadline_seconds,
            linger=linger,
            log=self.log,
            detail=dict(detail or {}),
        )
        self.log.opened(session)
        self._add(session)
        return session.key

    def note(self, id: str, detail: Mapping[str, Any]) -> None:
        """Replace a session's detail."""
        session = self.get(id)
        session.detail = dict(detail)
        self.log.noted(session)

    def end(self, id: str) -> None:
        """Refuse more calls, cancel the running ones and abandon their answers. Rewards can still be given."""
        session = self.get(id)
        if not session.closed:
            self._cut(session)
            self.log.noted(session)

    def close(self, id: str, *, keep: bool = False) -> SessionRecord:
        """End a session and return its record. With `keep`, its log stays until `forget`."""
        session = self._open.pop(id, None)
        if session is None:
            raise session_gone(id)
        self._names.pop(session.key, None)
        if not session.closed:
            self._cut(session)
        self._kept[id] = session
        if not keep:
            self.forget(id)
        return session.record()

    def forget(self, id: str) -> None:
        """Remove the log of a closed session: its record is safe elsewhere, or not needed. Unknown ids are ignored."""
        session = self._kept.pop(id, None)
        if session is not None:
            self.log.closed(session)

    def _cut(self, session: Session) -> None:
        session.closed = True
        for task, abandon in session.at_work.items():
            abandon()
            task.cancel()

    def _add(self, session: Session) -> None:
        session.places = asyncio.Semaphore(self.limits.concurrent)
        self._open[session.id] = session
        self._names[session.key] = session.id
        heappush(self._leaving, (session.deadline + session.linger, session.id, session.key))

    def _sweep(self) -> None:
        """Close sessions that were not closed in time, so that lost episodes do not accumulate."""
        now = self.clock.monotonic()
        while self._leaving and self._leaving[0][0] <= now:
            _, id, key = heappop(self._leaving)
            for held in (self._open, self._kept):
                if id in held and held[id].key == key:
                    if held is self._open:
                        self.close(id)
                    self.forget(id)

    def get(self, id: str) -> Session:
        session = self._open.get(id)
        if session is None:
            raise session_gone(id)
        return session

    def of_key(self, key: str) -> Session:
        """Return the session that `key` opens. It is refused if the session was closed, or opened again since."""
        name = self._names.get(key)
        if name is None:
            raise session_gone(self.name_in(key))
        return self.get(name)

    def name_in(self, key: str) -> str:
        """Return the id in a key that this gateway signed; empty for any other text."""
        if key in self._names:
            return self._names[key]
        name, _, signature = key.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(name).encode()):
            return ""
        return name.rpartition(".")[0]

    def _signed(self, name: str) -> str:
        return f"{name}.{self._sign(name)}"

    def _sign(self, name: str) -> str:
        return hmac.digest(self._secret, name.encode(), "sha256").hex()
