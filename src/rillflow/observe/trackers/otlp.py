"""A run's spans as OpenTelemetry has them, and what sends them by OTLP over HTTP (the extra `otel`).

Each episode is a trace of its own, with a span for each lease; a step is a span of its policy's trace, linked to the
episodes that it trained; the states of a worker are spans of its trace. Ids are made of the run's name and what they
are of, so a span that is sent again is the same span.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from rillflow.dataflow.episode_history import Episode, Step
from rillflow.storage.spans import Span

TIMEOUT = 10.0  # seconds for one request, its retries included
_LINKS = 128  # of a step: more are dropped by most receivers


class Ids:
    """The ids of the next span, for the SDK, which asks for them one by one."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._trace = self._span = 0

    def of(self, trace: str, span: str) -> tuple[int, int]:
        return _number(16, self._run, trace), _number(8, self._run, trace, span)

    def choose(self, trace: str, span: str) -> None:
        self._trace, self._span = self.of(trace, span)

    def generate_trace_id(self) -> int:
        return self._trace

    def generate_span_id(self) -> int:
        return self._span

    def is_trace_id_random(self) -> bool:
        return False


class Sender:
    """Sends spans; RuntimeError if the receiver takes none. Its address and headers may come from the environment."""

    def __init__(self, endpoint: str, run: str) -> None:
        self._ids = Ids(run)
        self._made = InMemorySpanExporter()
        resource = Resource.create({"service.name": "rillflow", "rillflow.run": run})
        provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._made))
        self._tracer = provider.get_tracer("rillflow")
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT)

    def send_episodes(self, episodes: Sequence[Episode]) -> None:
        names = ("state", "cause", "node", "group", "prompt", "lane", "reward", "samples", "calls")
        for one in episodes:
            self._ids.choose(one.id, one.attempt)
            status = Status(StatusCode.ERROR, one.cause) if one.state == "failed" else None
            self._make(f"episode {one.id}", (one.begin, one.end or one.begin), _about(one, names), status=status)
        self._send()

    def send_steps(self, steps: Sequence[tuple[Step, Sequence[tuple[str, str]]]]) -> None:
        """Each with the ids and attempts of the episodes that it trained."""
        names = ("version", "policy", "batch", "groups", "samples", "reward", "waited", "line")
        for step, episodes in steps:
            self._ids.choose(f"policy {step.policy}", step.batch)
            at = step.at or step.begin
            links = [Link(self._context(*episode)) for episode in episodes[:_LINKS]]
            times = (at - (step.seconds or 0.0), at)
            self._make(f"step to version {step.version}", times, _about(step, names), links=links)
        self._send()

    def send_states(self, worker: str, spans: Sequence[Span]) -> None:
        for span in spans:
            self._ids.choose(f"worker {worker}", str(span.begin))
            self._make(span.state, (span.begin, span.end), {"rillflow.worker": worker})
        self._send()

    def close(self) -> None:
        self._exporter.shutdown()

    def _make(
        self,
        name: str,
        times: tuple[float, float],
        about: Mapping[str, Any],
        *,
        links: Sequence[Link] = (),
        status: Status | None = None,
    ) -> None:
        begin, end = (round(time * 1e9) for time in times)
        span = self._tracer.start_span(name, context=Context(), attributes=about, links=links, start_time=begin)
        if status is not None:
            span.set_status(status)
        span.end(end)

    def _send(self) -> None:
        spans = self._made.get_finished_spans()
        self._made.clear()
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise RuntimeError("the receiver of spans did not take them")

    def _context(self, task: str, attempt: str) -> SpanContext:
        trace, span = self._ids.of(task, attempt)
        return SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _about(found: Episode | Step, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(found, name) for name in names}
    return {f"rillflow.{name}": value for name, value in values.items() if value not in (None, "")}


def _number(size: int, *names: str) -> int:
    """Return an id that is the same whenever it is asked for, and never zero."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=size).digest()
    return int.from_bytes(digest, "big") or 1
