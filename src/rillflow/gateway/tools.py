"""Tool calls in sampled text, Hermes and Qwen style: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

The parser is incremental and gives the same pieces however the text is cut. Text before, between and after calls
is content; blank text after a call is layout and dropped; what looks like a call but cannot be parsed stays text,
markers and all. Text that may yet become a marker is held back until it is decided.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rillflow.gateway.messages import dump_object, parse_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ParsedCall(NamedTuple):
    name: str
    arguments: str


Piece = str | ParsedCall


class ToolParser:
    """Turns text, piece by piece, into content and calls."""

    def __init__(self) -> None:
        self._buffer = ""
        self._inside = False
        self._after_call = False
        self._searched = 0

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """The text has ended: what was held back is content after all."""
        rest, self._buffer = (OPEN if self._inside else "") + self._buffer, ""
        self._inside = False
        pieces: list[Piece] = []
        self._emit(rest, pieces)
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        return self._close(pieces) if self._inside else self._open(pieces)

    def _open(self, pieces: list[Piece]) -> bool:
        before, marker, after = self._buffer.partition(OPEN)
        if marker:
            self._emit(before, pieces)
            self._buffer, self._inside, self._searched = after, True, 0
            return True
        keep = held_back(self._buffer, (OPEN,))
        ready = self._buffer[: len(self._buffer) - keep]
        if self._after_call and not ready.strip():
            return False
        self._emit(ready, pieces)
        self._buffer = self._buffer[len(ready) :]
        return False

    def _close(self, pieces: list[Piece]) -> bool:
        end = self._buffer.find(CLOSE, max(self._searched - len(CLOSE), 0))
        if end < 0:
            self._searched = len(self._buffer)
            return False
        body, self._buffer = self._buffer[:end], self._buffer[end + len(CLOSE) :]
        self._inside = False
        self._take(body, pieces)
        return True

    def _take(self, body: str, pieces: list[Piece]) -> None:
        # A marker that was opened and never closed is text; the call that follows it still counts.
        lost, marker, last = body.rpartition(OPEN)
        call = parse_call(last)
        if call is None:
            self._emit(OPEN + body + CLOSE, pieces)
            return
        if marker:
            self._emit(OPEN + lost, pieces)
        pieces.append(call)
        self._after_call = True

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        if not text or (self._after_call and not text.strip()):
            return
        self._after_call = False
        pieces.append(text)


def parse_call(body: str) -> ParsedCall | None:
    """The call that `body` describes, or None where it is not an object with a name and an object of arguments."""
    value = parse_object(body.strip())
    if value is None:
        return None
    name, arguments = value.get("name"), _arguments(value.get("arguments", {}))
    if not isinstance(name, str) or not name or arguments is None:
        return None
    return ParsedCall(name, dump_object(arguments))


def _arguments(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        return parse_object(value)
    return value if isinstance(value, dict) else None


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `markers`."""
    longest = min(len(text), max(map(len, markers)) - 1)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0


class StopStrings:
    """Cuts text at the first of the agent's stop strings; `hit` once one was found."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        text = self._held + text
        # The one that ends first, as if the text had come character by character.
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest
