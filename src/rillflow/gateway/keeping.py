"""What a session tells its log, so that it outlives the gateway's process. Without a log it lives in memory alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rillflow.gateway.session import Session
    from rillflow.gateway.tree import Node


class SessionLog(Protocol):
    """Where sessions are kept. `ended` returns once the answer, and all before it, is on disk."""

    def opened(self, session: Session) -> None: ...

    def begun(self, session: Session, policy: str, node: Node, *, live: bool) -> None:
        """Sampling of `node` begins. `live`: the agent may see tokens of it before it has ended."""

    async def ended(self, session: Session, policy: str, node: Node) -> None: ...

    def abandoned(self, session: Session, policy: str, node: Node) -> None:
        """Nobody will see the answer of `node`."""

    def closed(self, session: Session) -> None:
        """The session has ended and what it left is safe elsewhere, or wanted no more."""


class Unkept:
    """Keeps nothing."""

    def opened(self, session: Session) -> None: ...

    def begun(self, session: Session, policy: str, node: Node, *, live: bool) -> None: ...

    async def ended(self, session: Session, policy: str, node: Node) -> None: ...

    def abandoned(self, session: Session, policy: str, node: Node) -> None: ...

    def closed(self, session: Session) -> None: ...
