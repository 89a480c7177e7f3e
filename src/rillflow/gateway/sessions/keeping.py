"""What a session tells its log, so that it outlives the gateway's process. Without a log it lives in memory alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from rillflow.gateway.sessions.session import Session
    from rillflow.gateway.trees.tree import Node


class Asked(NamedTuple):
    """What the answers to one call share. `draw` is its number among the calls with the same prompt, `choices` how
    many answers it gets; `live`: the agent may see tokens of them before they have ended."""

    call: str
    policy: str
    draw: int
    choices: int = 1
    live: bool = False


class SessionLog(Protocol):
    """Where sessions are kept. What was told is on disk once `synced` returns; `ended` waits for it itself."""

    def restore(self) -> list[Session]:
        """The sessions that were not closed, with keys that lack their signatures. Asked once, before all else."""

    def opened(self, session: Session) -> None: ...

    def noted(self, session: Session) -> None:
        """The session's detail has changed, or it takes no more calls."""

    def begun(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None:
        """Sampling of `nodes`, one for each answer, begins."""

    async def shown(self, session: Session, asked: Asked) -> None:
        """Tokens of a live call are about to be seen: returns once its beginning is on disk."""

    async def ended(self, session: Session, asked: Asked, node: Node) -> None:
        """Returns once the answer, and all before it, is on disk; raises where that cannot be."""

    def abandoned(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None:
        """The call has failed: nobody will see these answers, but for those with something below them."""

    def rewarded(self, session: Session) -> None: ...

    def closed(self, session: Session) -> None:
        """The session has ended and what it left is safe elsewhere, or wanted no more."""

    async def synced(self) -> None: ...

    async def close(self) -> None: ...


class Unkept:
    """Keeps nothing."""

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
