"""Who may change its engine's weights now: never more than half of a policy's engines at once, so that it is sampled.

Kept in memory, and nothing depends on it: a turn that is not given back ends by itself, and an engine that gets no
answer goes ahead.
"""

from __future__ import annotations

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import BadRequest

TURN_SECONDS = 5.0  # who needs longer asks again meanwhile; who died does not


class Turns:
    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._until: dict[str, dict[str, float]] = {}

    def ask(self, policy: str, engine: str, engines: int) -> bool:
        """Whether `engine` may, of so many that serve the policy. Asked again by who has a turn, it lasts anew."""
        if not 0 < len(engine) <= 200:
            raise BadRequest("an engine's name has 1 to 200 characters", "give every engine a short name of its own")
        now = self._clock.monotonic()
        turns = {name: until for name, until in self._until.get(policy, {}).items() if until > now}
        granted = engine in turns or len(turns) < max(1, engines // 2)
        if granted:
            turns[engine] = now + TURN_SECONDS
        self._until[policy] = turns
        return granted

    def done(self, policy: str, engine: str) -> None:
        self._until.get(policy, {}).pop(engine, None)
