"""Sessions on disk, in a log of frames (`storage.frame_log`). An answer is written before its agent sees its end.

A given node is written with the first answer below it, so several answers to one prompt share it. After a restart a
session is built from its events again: the same trees, node for node. A call that was running when the process died
leaves no trace if its agent saw nothing of it, so that the agent's retry is the same draw. If an agent may have seen
tokens that are not in the log, or a frame is damaged, the session is marked (`incomplete`).

The log cannot tell whether an answer on disk also reached its agent. Such an answer stays, as one that did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rillflow.errors import Unavailable
from rillflow.gateway.sessions import events
from rillflow.gateway.sessions.events import (
    Abandoned,
    Answered,
    Asked,
    Begun,
    Kind,
    Noted,
    Opened,
    Piece,
    Root,
    SessionLog,
    decode,
    make,
)
from rillflow.gateway.sessions.rewards import Gift
from rillflow.gateway.sessions.session import Session, prompt_digest
from rillflow.gateway.trees.tree import Node
from rillflow.storage.frame_log import Damage, FrameLog
from rillflow.storage.segments import SEGMENT_BYTES

Target = tuple[tuple[str, ...], int | None, str | None]


@dataclass(slots=True)
class _Kept:
    """The events of a session that were written or queued: its opening, its nodes by number, and its rewards."""

    owner: int
    opened: bool = False
    nodes: set[int] = field(default_factory=set)
    gifts: dict[Target, Gift] = field(default_factory=dict)
    begun: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # live calls that no agent has seen yet

    def lose_opening(self) -> None:
        self.opened = False


class FileSessionLog:
    """A SessionLog in a folder, for one process at a time."""

    def __init__(self, folder: Path, *, limit: int = SEGMENT_BYTES) -> None:
        self._log = FrameLog(folder, limit=limit)
        self._kept: dict[str, _Kept] = {}

    def restore(self) -> list[Session]:
        found: dict[int, Restored] = {}
        for frame in self._log.replay():
            restored = found.setdefault(frame.owner, Restored())
            if isinstance(frame, Damage):
                restored.damaged(frame.what)
            elif frame.kind:
                restored.take(frame.kind, frame.payload)
            else:
                del found[frame.owner]
        sessions = []
        for owner, restored in found.items():
            session = restored.session(self)
            if session is None:
                self._log.end(owner)
                continue
            kept = self._kept[session.name] = _Kept(owner, opened=True, nodes=restored.written)
            kept.gifts = {_target(gift): gift for gift in session.rewards.state()}
            sessions.append(session)
        return sessions

    # ------------------------------------------------------------ events of a session

    def opened(self, session: Session) -> None:
        kept = self._kept[session.name] = _Kept(self._log.owner())
        self._open(session, kept)

    def _open(self, session: Session, kept: _Kept) -> None:
        """Write the opening before any other event of a session, and again if it was lost."""
        if not kept.opened:
            kept.opened = True
            event = Opened(
                session.id,
                session.name,
                session.seed,
                session.group,
                session.until,
                session.linger,
                dict(session.detail),
            )
            self._add(kept, Kind.OPENED, events.encode(event), kept.lose_opening)

    def noted(self, session: Session) -> None:
        kept = self._kept.get(session.name)
        if kept is not None:
            self._open(session, kept)
            noted = Noted(session.closed, dict(session.detail))
            self._log.owe(kept.owner, Kind.NOTED, events.encode(noted))

    def begun(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None:
        """Write the beginning of a live call; other calls show nothing early. `shown` raises an error from here."""
        kept = self._kept.get(session.name)
        if kept is None or not asked.live:
            return
        event = Begun(asked.call, session.calls, [node.id for node in nodes])
        try:
            self._open(session, kept)
            self._add(kept, Kind.BEGUN, events.encode(event))
            kept.begun[asked.call] = self._log.sync()
        except Unavailable as error:
            kept.begun[asked.call] = refused = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            refused.exception()  # marks it as retrieved: a call that fails earlier never awaits it

    async def shown(self, session: Session, asked: Asked) -> None:
        kept = self._kept.get(session.name)
        waiting = kept.begun.pop(asked.call, None) if kept is not None else None
        if waiting is not None:
            await waiting

    async def ended(self, session: Session, asked: Asked, node: Node) -> None:
        kept = self._kept.get(session.name)
        if kept is not None:
            self._answer(session, kept, asked, node)
            await self._log.sync()
            await self.shown(session, asked)  # the beginning of a live call must be on disk before its end

    def abandoned(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None:
        kept = self._kept.get(session.name)
        if kept is None:
            return
        kept.begun.pop(asked.call, None)
        gone = [node.id for node in nodes if node.abandoned]
        if asked.live or not kept.nodes.isdisjoint(gone):
            self._log.owe(kept.owner, Kind.ABANDONED, events.encode(Abandoned(asked.call, gone)))
        for node in nodes:
            # An answer that the engine aborted stays part of the session, unless the disk is full.
            if node.finish == "abort" and not node.abandoned and node.tokens:
                with suppress(Unavailable):
                    self._answer(session, kept, asked._replace(draw=-1), node)

    def rewarded(self, session: Session) -> None:
        kept = self._kept.get(session.name)
        if kept is None:
            return
        self._open(session, kept)
        new = {_target(gift): gift for gift in session.rewards.state() if kept.gifts.get(_target(gift)) != gift}
        kept.gifts |= new

        def lost() -> None:
            for target in new:
                kept.gifts.pop(target, None)

        self._add(kept, Kind.REWARDED, events.encode(list(new.values())), lost)

    def closed(self, session: Session) -> None:
        kept = self._kept.pop(session.name, None)
        if kept is not None:
            self._log.end(kept.owner)

    async def synced(self) -> None:
        await self._log.sync()

    async def close(self) -> None:
        await self._log.close()

    # ------------------------------------------------------------ writing

    def _answer(self, session: Session, kept: _Kept, asked: Asked, node: Node) -> None:
        self._open(session, kept)
        tree = session.trees[asked.policy]
        new = _unwritten(node, kept.nodes)
        payload = events.answered(asked, session.calls, node, [events.piece_of(one, tree) for one in new])
        numbers = {one.id for one in new}
        kept.nodes |= numbers
        self._add(kept, Kind.ANSWERED, payload, lambda: kept.nodes.difference_update(numbers))

    def _add(self, kept: _Kept, kind: Kind, payload: bytes, lost: Callable[[], None] | None = None) -> None:
        try:
            self._log.add(kept.owner, kind, payload, lost=lost)
        except BaseException:
            if lost is not None:
                lost()
            raise


def _target(gift: Gift) -> Target:
    return gift.answers, gift.leaf, gift.policy


def _unwritten(node: Node, written: set[int]) -> list[Node]:
    """Return the node and those above it that are not in the log, from the top."""
    new = [node]
    above = node.parent
    while above is not None and above.id not in written:
        new.append(above)
        above = above.parent
    new.reverse()
    return new


# ---------------------------------------------------------------- after a restart


@dataclass(slots=True)
class _Call:
    """The answers of a call that have ended."""

    policy: str
    draw: int
    choices: int
    nodes: set[int] = field(default_factory=set)


class Restored:
    """Builds a session from its events, taken in order. `written` are the numbers of the nodes in its log.

    Answers that no agent can have seen are left out.
    """

    def __init__(self) -> None:
        self.written: set[int] = set()
        self._opened: Opened | None = None
        self._noted: Noted | None = None
        self._pieces: dict[int, tuple[str, Piece]] = {}
        self._calls: dict[str, _Call] = {}
        self._live: dict[str, set[int]] = {}
        self._abandoned: set[int] = set()
        self._gifts: list[Gift] = []
        self._made = 0
        self._numbers = 0  # the next number of a node, also after nodes that were never written
        self._incomplete = ""

    def damaged(self, what: str) -> None:
        self._incomplete = self._incomplete or f"its log is damaged: {what}"

    def take(self, kind: int, payload: bytes) -> None:
        try:
            event = decode(kind, payload)
        except (msgspec.MsgspecError, KeyError) as error:
            self.damaged(f"an event of kind {kind} cannot be read: {error}")
            return
        if isinstance(event, Opened):
            self._opened = event
        elif isinstance(event, Noted):
            self._noted = event
        elif isinstance(event, Begun):
            self._live[event.call] = set(event.nodes)
            self._number(event.nodes)
            self._made = max(self._made, event.calls)
        elif isinstance(event, Answered):
            self._answer(event)
        elif isinstance(event, Abandoned):
            self._abandoned |= set(event.nodes)
            self._number(event.nodes)
            self._live.pop(event.call, None)
            self._calls.pop(event.call, None)
        else:
            self._gifts += event

    def _number(self, nodes: Iterable[int]) -> None:
        self._numbers = max(self._numbers, *(node + 1 for node in nodes), 0)

    def _answer(self, event: Answered) -> None:
        self._made = max(self._made, event.calls)
        for piece in event.pieces:
            self._pieces[piece.id] = (event.policy, piece)
            self.written.add(piece.id)
            self._number([piece.id])
        if event.draw >= 0:
            call = self._calls.setdefault(event.call, _Call(event.policy, event.draw, event.choices))
            call.nodes.add(event.node)

    # ------------------------------------------------------------ the session

    def session(self, log: SessionLog) -> Session | None:
        """Return the session with a key that lacks its signature; None if its opening is lost."""
        opened = self._opened
        if opened is None:
            return None
        session = Session(
            opened.id,
            f"{opened.name}.",
            opened.seed,
            opened.group,
            deadline=0.0,
            until=opened.until,
            linger=opened.linger,
            log=log,
            detail=self._detail(opened),
            calls=self._made,
            closed=self._noted is not None and self._noted.closed,
        )
        seen = self._seen()
        nodes = self._grow(session)
        for call in seen:
            self._draw(session, call, nodes)
        session.rewards.restore(self._gifts)
        session.incomplete = self._incomplete
        return session

    def _detail(self, opened: Opened) -> dict[str, Any]:
        return opened.detail if self._noted is None else self._noted.detail

    def _seen(self) -> list[_Call]:
        """Return the calls whose agents saw their answers; abandon the answers of the others."""
        seen = []
        for name, call in self._calls.items():
            if name not in self._live and len(call.nodes) < call.choices:
                self._abandoned |= call.nodes
            else:
                seen.append(call)
        for name, begun in self._live.items():
            ended = self._calls[name].nodes if name in self._calls else set()
            if begun != ended and not self._incomplete:
                self._incomplete = f"the gateway died while call {name} was streamed: its agent may have seen more"
        return seen

    def _grow(self, session: Session) -> dict[int, Node]:
        """Build the trees in the order in which their nodes were made. A node that was continued was seen."""
        continued = {piece.parent for _, piece in self._pieces.values() if not isinstance(piece, Root)}
        unseen = self._abandoned - continued
        nodes: dict[int, Node] = {}
        for number in sorted(self._pieces.keys() - unseen):
            policy, piece = self._pieces[number]
            session.numbers.next = number
            node = make(piece, session.tree(policy), nodes)
            if node is None:
                self.damaged(f"the parent of node {number} is missing")
                continue
            nodes[number] = node
            session.count(node)
        session.numbers.next = self._numbers
        return nodes

    def _draw(self, session: Session, call: _Call, nodes: dict[int, Node]) -> None:
        given = next((nodes[number].parent for number in call.nodes if number in nodes), None)
        if given is not None:
            session.draws.setdefault(prompt_digest(call.policy, given.ids()), set()).add(call.draw)
