"""Sessions on disk: every answer is there before its agent is told that it has ended.

A given node is written with the first answer below it, so several answers to one prompt share it. Of calls that were
at work when the process died, those that nobody saw anything of leave no trace: the agent's retry is the same draw.
Where an agent may have seen tokens that are not here, or a frame is damaged, the session says so (`incomplete`).
What this cannot tell: whether an answer that was on disk also reached its agent. It stays, as one that did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rillflow.errors import Unavailable
from rillflow.gateway.sessions import frames
from rillflow.gateway.sessions.frames import Kind
from rillflow.gateway.sessions.keeping import Asked
from rillflow.gateway.sessions.restoring import Restored
from rillflow.gateway.sessions.rewards import Gift
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.trees.tree import Node
from rillflow.storage.frame_log import Damage, FrameLog
from rillflow.storage.segments import SEGMENT_BYTES

Target = tuple[tuple[str, ...], int | None, str | None]


@dataclass(slots=True)
class _Kept:
    """What of a session is in the log, or on its way there: its opening, its nodes by number, its rewards."""

    owner: int
    opened: bool = False
    nodes: set[int] = field(default_factory=set)
    gifts: dict[Target, Gift] = field(default_factory=dict)
    begun: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # live calls that nobody has seen yet

    def lose_opening(self) -> None:
        self.opened = False


class FileSessionLog:
    """A SessionLog in a folder of its own, which one process at a time may use."""

    def __init__(self, folder: Path, *, limit: int = SEGMENT_BYTES) -> None:
        self._log = FrameLog(folder, limit=limit)
        self._kept: dict[str, _Kept] = {}

    # ------------------------------------------------------------ after a restart

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

    # ------------------------------------------------------------ what it is told

    def opened(self, session: Session) -> None:
        kept = self._kept[session.name] = _Kept(self._log.owner())
        self._open(session, kept)

    def _open(self, session: Session, kept: _Kept) -> None:
        """Before anything else of a session, and again where it was lost."""
        if not kept.opened:
            kept.opened = True
            event = frames.Opened(
                session.id,
                session.name,
                session.seed,
                session.group,
                session.until,
                session.linger,
                dict(session.detail),
            )
            self._add(kept, Kind.OPENED, frames.encode(event), kept.lose_opening)

    def noted(self, session: Session) -> None:
        kept = self._kept.get(session.name)
        if kept is not None:
            self._open(session, kept)
            noted = frames.Noted(session.closed, dict(session.detail))
            self._log.owe(kept.owner, Kind.NOTED, frames.encode(noted))

    def begun(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None:
        """Only of live calls: of others nothing is seen before they end. Where it is refused, `shown` says so."""
        kept = self._kept.get(session.name)
        if kept is None or not asked.live:
            return
        event = frames.Begun(asked.call, session.calls, [node.id for node in nodes])
        try:
            self._open(session, kept)
            self._add(kept, Kind.BEGUN, frames.encode(event))
            kept.begun[asked.call] = self._log.sync()
        except Unavailable as error:
            kept.begun[asked.call] = refused = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            refused.exception()  # a call that fails before does not ask for it

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
            await self.shown(session, asked)  # no end of a live call without its beginning

    def abandoned(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None:
        kept = self._kept.get(session.name)
        if kept is None:
            return
        kept.begun.pop(asked.call, None)
        gone = [node.id for node in nodes if node.abandoned]
        if asked.live or not kept.nodes.isdisjoint(gone):
            self._log.owe(kept.owner, Kind.ABANDONED, frames.encode(frames.Abandoned(asked.call, gone)))
        for node in nodes:
            # What the engine cut off stays part of the session, as far as there is room: its call has failed anyway.
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

        self._add(kept, Kind.REWARDED, frames.encode(list(new.values())), lost)

    def closed(self, session: Session) -> None:
        kept = self._kept.pop(session.name, None)
        if kept is not None:
            self._log.end(kept.owner)

    async def synced(self) -> None:
        await self._log.sync()

    async def close(self) -> None:
        await self._log.close()

    # ------------------------------------------------------------ frames

    def _answer(self, session: Session, kept: _Kept, asked: Asked, node: Node) -> None:
        self._open(session, kept)
        tree = session.trees[asked.policy]
        new = _unwritten(node, kept.nodes)
        payload = frames.answered(asked, session.calls, node, [frames.piece_of(one, tree) for one in new])
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
    """The node and those above it that are not in the log, from the top."""
    new = [node]
    above = node.parent
    while above is not None and above.id not in written:
        new.append(above)
        above = above.parent
    new.reverse()
    return new
