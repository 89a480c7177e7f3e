"""Hermes and Qwen style: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in the text.

Text before, between and after calls is content; blank text after a call is layout and dropped. Text that may yet
become a marker is held back until it is decided. A closing marker inside a string of the call is part of the string.
"""

from __future__ import annotations

from collections.abc import Collection

from rillflow.gateway.reading.stops import held_back
from rillflow.gateway.reading.tools.parts import Part, parse_call
from rillflow.gateway.reading.tools.scanning import JsonScan

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """Outside a call `_held` is what may become the opening marker, inside one what may become the closing one."""

    def __init__(self, allowed: Collection[str] | None = None) -> None:
        self._allowed = allowed
        self._held = ""
        self._body: list[str] = []
        self._scan: JsonScan | None = None
        self._after_call = False

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._outside(parts) if self._scan is None else self._inside(self._scan, parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._scan is None:
            self._emit(self._held, parts)
        else:
            self._reread("".join(self._body) + self._held, parts)
        self._held, self._scan = "", None
        return parts

    def _outside(self, parts: list[Part]) -> bool:
        before, marker, after = self._held.partition(OPEN)
        if marker:
            self._emit(before, parts)
            self._held, self._body, self._scan = after, [], JsonScan()
            return True
        ready = self._held[: len(self._held) - held_back(self._held, (OPEN,))]
        if self._after_call and not ready.strip():
            return False
        self._emit(ready, parts)
        self._held = self._held[len(ready) :]
        return False

    def _inside(self, scan: JsonScan, parts: list[Part]) -> bool:
        before, marker, after = self._held.partition(CLOSE)
        if not marker:
            ready = self._held[: len(self._held) - held_back(self._held, (CLOSE,))]
            self._body.append(ready)
            scan.feed(ready)
            self._held = self._held[len(ready) :]
            return False
        self._body.append(before)
        scan.feed(before)
        self._held = after
        if scan.quoted:
            self._body.append(CLOSE)
            return True
        self._scan = None
        self._take("".join(self._body), parts)
        return True

    def _take(self, body: str, parts: list[Part]) -> None:
        # A marker that was opened and never closed is text; the call that follows it still counts.
        call, lost = parse_call(body, self._allowed), ""
        if call is None and OPEN in body:
            lost, _, last = body.rpartition(OPEN)
            call, lost = parse_call(last, self._allowed), OPEN + lost
        if call is None:
            self._emit(OPEN + body + CLOSE, parts)
            return
        self._emit(lost, parts)
        parts.append(call)
        self._after_call = True

    def _reread(self, body: str, parts: list[Part]) -> None:
        """The call never ended. A quote left open may have hidden a closing marker: then that ends it after all."""
        while (at := body.find(CLOSE)) >= 0:
            self._take(body[:at], parts)
            before, marker, body = body[at + len(CLOSE) :].partition(OPEN)
            self._emit(before, parts)
            if not marker:
                return
        self._emit(OPEN + body, parts)

    def _emit(self, text: str, parts: list[Part]) -> None:
        if not text or (self._after_call and not text.strip()):
            return
        self._after_call = False
        parts.append(text)
