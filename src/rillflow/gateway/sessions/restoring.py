"""A session out of its events: the same trees, node for node, with what no agent can have seen left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rillflow.gateway.sessions.frames import (
    Abandoned,
    Answered,
    Begun,
    Noted,
    Opened,
    Piece,
    Root,
    decode,
    make,
)
from rillflow.gateway.sessions.keeping import SessionLog
from rillflow.gateway.sessions.rewards import Gift
from rillflow.gateway.sessions.session import Session, prompt_digest
from rillflow.gateway.trees.tree import Node


@dataclass(slots=True)
class _Call:
    """The answers of a call that have ended."""

    policy: str
    draw: int
    choices: int
    nodes: set[int] = field(default_factory=set)


class Restored:
    """Takes a session's events in order; `written` are the numbers of the nodes that its log has."""

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
        self._numbers = 0  # of nodes that were given, also to those that nobody wrote down
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
        """As it was, its key without a signature; None where its opening is lost."""
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
        """The calls whose agents have their answers; what of the others nobody saw is set apart."""
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
        """The trees, in the order in which their nodes were made; who was continued from was seen."""
        continued = {piece.parent for _, piece in self._pieces.values() if not isinstance(piece, Root)}
        unseen = self._abandoned - continued
        nodes: dict[int, Node] = {}
        for number in sorted(self._pieces.keys() - unseen):
            policy, piece = self._pieces[number]
            session.numbers.next = number
            node = make(piece, session.tree(policy), nodes)
            if node is None:
                self.damaged(f"node {number} hangs on one that is missing")
                continue
            nodes[number] = node
            session.count(node)
        session.numbers.next = self._numbers
        return nodes

    def _draw(self, session: Session, call: _Call, nodes: dict[int, Node]) -> None:
        given = next((nodes[number].parent for number in call.nodes if number in nodes), None)
        if given is not None:
            session.draws.setdefault(prompt_digest(call.policy, given.prompt()), set()).add(call.draw)
