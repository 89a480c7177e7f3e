"""The engine processes of a run, as they tell of themselves. Kept in memory: a beat comes every second."""

from __future__ import annotations

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import BadRequest
from rillflow.types import EngineInfo, Engines

SILENT_SECONDS = 5.0
_MOST = 4096


class EngineRoster:
    """Who was heard of lately. One that is silent for too long is left out until it is heard of again."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._heard: dict[str, tuple[float, EngineInfo]] = {}
        self._notable: dict[str, tuple[str, dict[str, int], str]] = {}
        self._news = 0

    def forget(self, name: str) -> None:
        """An engine that has been told that the run has ended: nobody waits for it any more."""
        self._heard.pop(name, None)

    def hear(self, info: EngineInfo) -> Engines:
        """Note a beat; the answer is everybody."""
        if not 0 < len(info.name) <= 200 or not info.url.startswith("http://") or len(info.url) > 300:
            raise BadRequest("an engine tells its name and where it listens", "a name of 1 to 200 characters and a URL")
        engines = self.engines()
        if info.name not in self._heard and len(self._heard) >= _MOST:
            raise BadRequest(f"there are {_MOST} engines already", "are names drawn anew with each start?")
        self._heard[info.name] = (self._clock.monotonic(), info)
        others = [one for one in engines.engines if one.name != info.name]
        return Engines(engines=[*others, info], news=self._look())

    def engines(self) -> Engines:
        since = self._clock.monotonic() - SILENT_SECONDS
        self._heard = {name: heard for name, heard in self._heard.items() if heard[0] >= since}
        return Engines(engines=[info for _, info in self._heard.values()], news=self._look())

    def _look(self) -> int:
        """How loaded an engine is changes all the time: nobody waits for that."""
        notable = {name: (info.url, info.versions, info.paused) for name, (_, info) in self._heard.items()}
        self._news += notable != self._notable
        self._notable = notable
        return self._news

    def serving(self, policy: str) -> list[int]:
        """Of every engine process that serves the policy, the version that it serves."""
        return [info.versions[policy] for info in self.engines().engines if policy in info.versions]
