"""Calls behind a marker: the parsers that most formats share.

Text before, between and after calls is content; blank text after a call is layout and dropped. Text that may yet
become a marker is held back until it is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rillflow.gateway.reading.stops import held_back
from rillflow.gateway.reading.tools.parts import ParsedCall, Part
from rillflow.gateway.reading.tools.scanning import JsonScan, Quotes

Read = Callable[[str], Sequence[ParsedCall] | None]


class _Marked:
    """Finds the opening marker. `_opened` is the one that was found; empty outside a call, where `_held` is what may
    become a marker."""

    def __init__(self, opens: tuple[str, ...], read: Read) -> None:
        self.unparsed = 0
        self._opens = opens
        self._read = read
        self._held = ""
        self._opened = ""
        self._body: list[str] = []
        self._after_call = False

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._inside(parts) if self._opened else self._outside(parts):
            pass
        return parts

    def _inside(self, parts: list[Part]) -> bool:
        raise NotImplementedError

    def _outside(self, parts: list[Part]) -> bool:
        found = [(at, marker) for marker in self._opens if (at := self._held.find(marker)) >= 0]
        if found:
            at, self._opened = min(found)
            self._emit(self._held[:at], parts)
            self._held, self._body = self._held[at + len(self._opened) :], []
            return True
        ready = self._held[: len(self._held) - held_back(self._held, self._opens)]
        if self._after_call and not ready.strip():
            return False
        self._emit(ready, parts)
        self._held = self._held[len(ready) :]
        return False

    def _told(self, calls: Sequence[ParsedCall], parts: list[Part]) -> None:
        parts += calls
        self._after_call = True

    def _lost(self, text: str, parts: list[Part]) -> None:
        """A call that cannot be parsed: it stays text, and is counted."""
        self.unparsed += 1
        self._emit(text, parts)

    def _emit(self, text: str, parts: list[Part]) -> None:
        if not text or (self._after_call and not text.strip()):
            return
        self._after_call = False
        parts.append(text)


class Blocks(_Marked):
    """Calls between an opening and a closing marker. `quoting`: a closing marker inside a JSON string of the call is
    part of the string."""

    def __init__(self, open: str, close: str, read: Read, *, quoting: bool = True) -> None:
        super().__init__((open,), read)
        self._close = close
        self._quoting = quoting
        self._quotes = Quotes()

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._opened:
            self._reread("".join(self._body) + self._held, parts)
        else:
            self._emit(self._held, parts)
        self._held = self._opened = ""
        return parts

    def _inside(self, parts: list[Part]) -> bool:
        before, marker, after = self._held.partition(self._close)
        if not marker:
            ready = self._held[: len(self._held) - held_back(self._held, (self._close,))]
            self._take(ready)
            self._held = self._held[len(ready) :]
            return False
        self._take(before)
        self._held = after
        if self._quotes.quoted:
            self._body.append(self._close)
            return True
        self._ended("".join(self._body), parts)
        self._opened, self._quotes = "", Quotes()
        return True

    def _take(self, text: str) -> None:
        self._body.append(text)
        if self._quoting:
            self._quotes.feed(text)

    def _ended(self, body: str, parts: list[Part]) -> None:
        # A marker that was opened and never closed is text; the call that follows it still counts.
        (open,) = self._opens
        calls, lost = self._read(body), ""
        if calls is None and open in body:
            lost, _, last = body.rpartition(open)
            calls, lost = self._read(last), open + lost
        if calls is None:
            self._lost(open + body + self._close, parts)
            return
        if lost:
            self._lost(lost, parts)
        self._told(calls, parts)

    def _reread(self, body: str, parts: list[Part]) -> None:
        """The call never ended. A quote left open may have hidden a closing marker: then that ends it after all."""
        (open,) = self._opens
        while (at := body.find(self._close)) >= 0:
            self._ended(body[:at], parts)
            before, marker, body = body[at + len(self._close) :].partition(open)
            self._emit(before, parts)
            if not marker:
                return
        self._lost(open + body, parts)


class Values(_Marked):
    """Calls that end with their JSON value: a marker, a head (a name, say) and an object or a list.

    The head has at most `_HEAD` characters. A value that begins right behind the marker may be a list.
    """

    _HEAD = 400

    def __init__(self, opens: tuple[str, ...], read: Read) -> None:
        super().__init__(opens, read)
        self._scan: JsonScan | None = None

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._opened:
            self._lost(self._opened + "".join(self._body) + self._held, parts)
        else:
            self._emit(self._held, parts)
        self._held = self._opened = ""
        self._body, self._scan = [], None
        return parts

    def _inside(self, parts: list[Part]) -> bool:
        if self._scan is None and not self._begun(parts):
            return not self._opened
        assert self._scan is not None
        size = self._scan.feed(self._held)
        self._body.append(self._held[:size])
        self._held = self._held[size:]
        if not (self._scan.ended or self._scan.broken):
            return False
        body = "".join(self._body)
        calls = self._read(body) if self._scan.ended else None
        if calls is None:
            self._lost(self._opened + body, parts)
        else:
            self._told(calls, parts)
        self._opened, self._scan = "", None
        return True

    def _begun(self, parts: list[Part]) -> bool:
        """Whether the value has begun. Text without one is given up."""
        start = self._held.lstrip()
        blank = len(self._held) - len(start)
        at = blank if start.startswith("[") else self._held.find("{")
        if at >= 0 and at <= self._HEAD:
            self._body, self._held = [self._held[:at]], self._held[at:]
            self._scan = JsonScan()
            return True
        if at < 0 and len(self._held) <= self._HEAD:
            return False
        self._lost(self._opened, parts)
        self._opened = ""
        return False
