"""What engines that serve nothing yet are fetching: those versions stay in the weight store until they have them.

Kept in memory: an engine says so again every few seconds, and one that died does not.
"""

from __future__ import annotations

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import BadRequest
from rillflow.types import TellFetch

# That a word counts. Who needs longer says it again meanwhile; who has the version is soon heard to serve it.
FETCH_SECONDS = 15.0
_MOST = 4096


class Fetches:
    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._until: dict[tuple[str, str], tuple[float, int]] = {}

    def tell(self, news: TellFetch) -> None:
        if not 0 < len(news.engine) <= 200 or news.version < 0:
            raise BadRequest(
                "an engine tells its name and the version that it fetches", "1 to 200 characters; 0 or more"
            )
        key = (news.policy, news.engine)
        self._forget_old()
        if key not in self._until and len(self._until) >= _MOST:
            raise BadRequest(f"{_MOST} engines are fetching already", "are names drawn anew with each start?")
        self._until[key] = (self._clock.monotonic() + FETCH_SECONDS, news.version)

    def versions(self, policy: str) -> list[int]:
        self._forget_old()
        return [version for (of, _), (_, version) in self._until.items() if of == policy]

    def _forget_old(self) -> None:
        now = self._clock.monotonic()
        self._until = {key: word for key, word in self._until.items() if word[0] > now}
