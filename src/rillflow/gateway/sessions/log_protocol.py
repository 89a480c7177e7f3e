"""The protocol of a session's log. With a log, a session survives the gateway's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from rillflow.gateway.sessions.session import Session
    from rillflow.gateway.trees.tree import Node


class Asked(NamedTuple):
    """What the answers to one call share.

    `draw` is its number among the calls with the same prompt, `choices` the number of its answers. `live`: the agent
    may see tokens before an answer has ended.
    """

    call: str
    policy: str
    draw: int
    choices: int = 1
    live: bool = False


class SessionLog(Protocol):
    """Where sessions are kept. Events are on disk once `synced` returns; `ended` waits for that itself."""

    def restore(self) -> list[Session]:
        """Return the sessions that were not closed, with keys that lack their signatures. It is called once, first."""

    def opened(self, session: Session) -> None: ...

    def noted(self, session: Session) -> None:
        """Record that the session's detail has changed, or that it takes no more calls."""

    def begun(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None:
        """Record that sampling of `nodes`, one for each answer, begins."""

    async def shown(self, session: Session, asked: Asked) -> None:
        """Return once the beginning of a live call, whose tokens are about to be seen, is on disk."""

    async def ended(self, session: Session, asked: Asked, node: Node) -> None:
        """Return once the answer, and everything before it, is on disk. Raises if it cannot be written."""

    def abandoned(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None:
        """Record that a call has failed. Its answers are never shown, except those that a later call extends."""

    def rewarded(self, session: Session) -> None: ...

    def closed(self, session: Session) -> None:
        """Forget a session: its record is safe elsewhere, or not needed."""

    async def synced(self) -> None: ...

    async def close(self) -> None: ...


class NoSessionLog:
    """A log that keeps nothing."""

    def restore(self) -> list[Session]:
        return []

    def opened(self, session: Session) -> None: ...

    def noted(self, session: Session) -> None: ...

    def begun(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None: ...

    async def shown(self, session: Session, asked: Asked) -> None: ...

    async def ended(self, session: Session, asked: Asked, node: Node) -> None: ...

    def abandoned(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None: ...

    def rewarded(self, session: Session) -> None: ...

    def closed(self, session: Session) -> None: ...

    async def synced(self) -> None: ...

    async def close(self) -> None: ...
