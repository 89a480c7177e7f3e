"""The line of a policy as a relay knows it: polled upstream, stored on disk, served to all waiting readers.

Invariants: one request per policy waits upstream, however many wait here; a known line is served while upstream is
away, also after a restart, with a header that says how old it is.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from urllib.parse import quote

from rillflow.contracts import Clock
from rillflow.errors import RillflowError, StorageError, Unavailable
from rillflow.storage import write_atomic
from rillflow.weights.manifest import EMPTY, Entry, Line, parse_line
from rillflow.weights.transport.mirrors import Mirrors, NotThere
from rillflow.weights.transport.serve import NOTHING, Told, tag_of

log = logging.getLogger(__name__)

IDLE = 900.0  # seconds without a request after which a policy is no longer followed
FIRST_WAIT = 15.0  # seconds for upstream's first answer
_WAIT = 20.0
_LEAST_PAUSE = 0.02
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0


class Follower:
    """Follows one policy until no reader has asked for `IDLE` seconds, or `close`."""

    def __init__(self, mirrors: Mirrors, policy: str, kept: Path, clock: Clock) -> None:
        self._mirrors = mirrors
        self._policy = policy
        self._path = kept
        self._clock = clock
        self._told: Told | None = None
        self._line = EMPTY
        self._heard: float | None = None  # when upstream last answered
        self._away: RillflowError | None = None
        self._asked = clock.monotonic()
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._follow(), name=f"follow-{policy}")

    @property
    def ended(self) -> bool:
        return self._task.done()

    def entry(self, version: int) -> Entry | None:
        """Return the line's entry of a version."""
        return self._line.entries.get(version)

    async def line(self, known: str, wait: float) -> Told:
        end = self._clock.monotonic() + wait
        while True:
            self._asked = self._clock.monotonic()
            if self._heard is None and self._away is None:
                await self._next(FIRST_WAIT)
            elif self._told is not None and self._told.tag == known and self._asked < end:
                await self._next(end - self._asked)
                continue
            if self._told is None:
                why = self._away.message if self._away is not None else "no answer yet"
                raise Unavailable(f"this relay does not know the line of {self._policy}: {why}", "is upstream running?")
            return self._told._replace(notes=self._notes())

    def _notes(self) -> dict[str, str]:
        if self._away is None:
            return {}
        age = "unknown" if self._heard is None else f"{self._clock.monotonic() - self._heard:.1f}"
        return {"x-rillflow-upstream": "away", "x-rillflow-age": age}

    async def _next(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    # ------------------------------------------------------------ upstream

    async def _follow(self) -> None:
        self._told, self._line = await asyncio.to_thread(_read, self._path)
        pause = _FIRST_PAUSE
        while self._clock.monotonic() - self._asked < IDLE:
            try:
                await self._ask()
                self._heard, self._away = self._clock.monotonic(), None
                pause = _FIRST_PAUSE
                await asyncio.sleep(_LEAST_PAUSE)  # some servers answer at once
            except RillflowError as error:
                if self._away is None:
                    log.warning("upstream is away: %s", error)
                    self._away = error
                    self._tell()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _ask(self) -> None:
        # The first request does not wait: its answer shows whether upstream is running.
        first = self._heard is None or self._away is not None
        tag, wait = (self._told.tag, _WAIT) if self._told is not None else ("", 0.0)
        wait = 0.0 if first else wait
        data, line = b"", EMPTY
        try:
            answer = await self._mirrors.get(f"/weights/{self._policy}/line?known={quote(tag)}&wait={wait}", wait)
            if answer.status != 304:
                data, line = answer.data, self._mirrors.read(answer, lambda text, what: parse_line(text, b"", what))
            elif self._told is not None:
                data, line = self._told.data, self._line
        except NotThere:
            pass
        told = Told(data, tag_of(data) if data else NOTHING)
        changed = self._told is None or told.tag != self._told.tag
        if changed:
            self._told, self._line = told, line
        if changed or first:
            self._tell()
        if changed and data:
            await asyncio.to_thread(_write, self._path, data)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _read(path: Path) -> tuple[Told | None, Line]:
    try:
        data = path.read_bytes()
        line = parse_line(data, b"", str(path))
    except (OSError, RillflowError):
        return None, EMPTY
    return Told(data, tag_of(data)), line


def _write(path: Path, data: bytes) -> None:
    """Store the line for the next start; an error is only logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except (OSError, StorageError) as error:
        log.warning("the line was not stored on disk: %s", error)
