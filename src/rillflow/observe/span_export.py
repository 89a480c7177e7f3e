"""The spans of a run, sent by OTLP over HTTP while it runs (`observe.opentelemetry`).

The same spans as in `rillflow trace`. What was sent is noted in RUN/trackers/opentelemetry.json, so a resumed run goes
on after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rillflow.dataflow.episode_history import Episode, ended_episodes, ended_steps
from rillflow.dataflow.ledger.database import snapshot
from rillflow.observe.follower import Follower, Note, Outcome
from rillflow.storage.spans import Span, SpanFollower

if TYPE_CHECKING:
    from rillflow.observe.otlp import Sender

EVERY = 5.0  # seconds between two looks
BATCH = 500  # spans that are sent at once


class SentSpans(msgspec.Struct):
    """Up to which time everything has been sent; of episodes by the number of their ledger."""

    episodes: dict[int, float] = {}
    steps: float = 0.0
    workers: dict[str, float] = {}


class SpanExport(Follower):
    """Follows the ledgers and the timeline of a run folder."""

    def __init__(self, endpoint: str, run: Path, ledgers: Sequence[Path], *, every: float = EVERY) -> None:
        super().__init__("opentelemetry", poll=every)
        self._endpoint = endpoint
        self._run = run
        self._ledgers = ledgers
        self._note = Note(run / "trackers" / "opentelemetry.json", SentSpans())
        self._sender: Sender | None = None
        self._spans = SpanFollower(run)
        self._waiting: dict[str, list[Span]] = {}  # states that were read and not sent

    def advance(self) -> bool:
        if not self._opened_all():
            return False
        return self._episodes() or self._steps() or self._states()

    def close(self, outcome: Outcome) -> None:
        if self._sender is not None:
            self._sender.close()

    def unsent(self) -> str:
        if not self._opened_all():
            return ""
        numbers = [len(self._ended(ledger)) for ledger in range(len(self._ledgers))]
        episodes = sum(numbers)
        return f"{episodes}{' or more' * (max(numbers) >= BATCH)} episodes" if episodes else ""

    def _opened_all(self) -> bool:
        return all(path.is_file() for path in self._ledgers)

    # ------------------------------------------------------------ what there is to send

    def _episodes(self) -> bool:
        sent = False
        for ledger in range(len(self._ledgers)):
            if found := self._ended(ledger):
                self._opened().send_episodes(found)
                last = max(one.end or 0.0 for one in found)
                self._note.keep(episodes={**self._note.kept.episodes, ledger: last})
                sent = True
        return sent

    def _ended(self, ledger: int) -> list[Episode]:
        """Return the next episodes of a ledger that have ended and were not sent."""
        with snapshot(self._ledgers[ledger]) as reads:
            return ended_episodes(reads, self._note.kept.episodes.get(ledger, 0.0), BATCH)

    def _steps(self) -> bool:
        with ExitStack() as stack:
            ledgers = [stack.enter_context(snapshot(path)) for path in self._ledgers]
            found = ended_steps(ledgers, self._note.kept.steps, BATCH)
        if found:
            self._opened().send_steps(found)
            self._note.keep(steps=max(step.at or 0.0 for step, _ in found))
        return bool(found)

    def _states(self) -> bool:
        """The states of workers that have ended; at the end of the run all."""
        if not self._waiting:
            for worker, spans in self._spans.new(rest=self._stop.is_set()).items():
                sent = self._note.kept.workers.get(worker, 0.0)
                self._waiting[worker] = [span for span in spans if span.end > sent and span.state != "idle"]
        for worker, spans in list(self._waiting.items()):
            while spans:
                self._opened().send_states(worker, spans[:BATCH])
                self._note.keep(workers={**self._note.kept.workers, worker: spans[:BATCH][-1].end})
                del spans[:BATCH]
            del self._waiting[worker]
        return False

    def _opened(self) -> Sender:
        if self._sender is None:
            from rillflow.observe.otlp import Sender  # an extra

            self._sender = Sender(self._endpoint, self._run.name)
        return self._sender
