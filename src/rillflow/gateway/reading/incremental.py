"""Scanners for text that arrives in pieces: ids to characters, stop strings, and the ends of JSON values.

Each gives the same result however the text is cut, in time that is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable

_HALF = "\ufffd"
_WINDOW = 24  # ids that are decoded again with each step, before old ones are dropped
_PATIENCE = 8  # ids without a whole character until decoding is tried less often; a character has at most four bytes
_BARE = re.compile(r'["{}\[\]]')
_QUOTED = re.compile(r'["\\\n]')
_OPENING = re.compile('"')


# ---------------------------------------------------------------- ids to text


class Detokeniser:
    """The text of a growing list of ids, in whole characters. Ids in `hidden` (the stop tokens) have no text.

    A token may hold part of a character's bytes, and decoding it alone gives the replacement character. Text is
    returned up to the last whole character, and each step decodes only the few ids since then. If no whole character
    comes for long (a model that samples garbage), the next decoding waits until twice as many ids have come, so that
    the total cost stays linear.
    """

    def __init__(self, decode: Callable[[list[int]], str], hidden: Container[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        # Decoded again with each step: `_said` is the text of the first `_known` ids, which was already returned. The
        # ids of at least one step stay before the next ones: some decoders write the first token of a text differently.
        self._window: list[int] = []
        self._known = 0
        self._said = ""
        self._look_at = 0

    def feed(self, ids: Iterable[int]) -> str:
        self._window.extend(id for id in ids if id not in self._hidden)
        if len(self._window) < self._look_at:
            return ""
        text = self._decode(self._window)
        if text.endswith(_HALF):
            waiting = len(self._window) - self._known
            self._look_at = self._known + 2 * waiting if waiting > _PATIENCE else 0
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """Return the rest of the text. Part of a character becomes the replacement character."""
        return self._advance(self._decode(self._window)) if len(self._window) > self._known else ""

    def whole(self, ids: Iterable[int]) -> str:
        """Return the text of ids that come all at once, as `feed` and `finish` would."""
        return self._decode([id for id in ids if id not in self._hidden])

    def _advance(self, text: str) -> str:
        new = text[len(self._said) :]
        if len(self._window) > _WINDOW:
            self._window = self._window[self._known :]
            text = self._decode(self._window)
        self._known = len(self._window)
        self._said = text
        self._look_at = 0
        return new


# ---------------------------------------------------------------- stop strings and markers


class StopStrings:
    """Cuts text at the first of the agent's stop strings. `hit` is that string; empty until one is found."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.hit = ""

    def feed(self, text: str) -> str:
        if self.hit:
            return ""
        text = self._held + text
        # The one that ends first, as if the text had come character by character; the longest of several.
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            _, start, self.hit = min(found)
            self._held = ""
            return text[:start]
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of `markers`."""
    longest = min(len(text), max(map(len, markers)) - 1)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0


# ---------------------------------------------------------------- JSON


class JsonScan:
    """Finds the end of one object or array. `quoted` is set inside a string of it.

    Only the nesting is followed, not the validity. Braces and markers inside strings do not count. A raw line break
    inside a string sets `broken`: JSON has none, so the quote was never closed.
    """

    __slots__ = ("_depth", "_escaped", "broken", "ended", "quoted")

    def __init__(self) -> None:
        self._depth = 0
        self._escaped = False
        self.quoted = False
        self.broken = False
        self.ended = False

    def feed(self, text: str) -> int:
        """Return how many characters of `text` belong to the value: all of them unless the value has ended."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while not (self.ended or self.broken):
            found = (_QUOTED if self.quoted else _BARE).search(text, at)
            if found is None:
                return len(text)
            at = self._step(found[0], found.end(), len(text))
            if at > len(text):
                return len(text)
        return at

    def _step(self, mark: str, after: int, size: int) -> int:
        if mark == '"':
            self.quoted = not self.quoted
        elif mark == "\\":
            self._escaped = after == size
            return after + 1
        elif mark == "\n":
            self.quoted, self.broken = False, True
        elif mark in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.ended = self._depth <= 0
        return after


class Quotes:
    """Finds JSON strings among other text. `quoted` is set inside a string.

    A raw line break inside a string sets `broken`, and nothing after it counts as quoted.
    """

    __slots__ = ("_escaped", "broken", "quoted")

    def __init__(self) -> None:
        self._escaped = False
        self.quoted = False
        self.broken = False

    def feed(self, text: str) -> None:
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while not self.broken:
            found = (_QUOTED if self.quoted else _OPENING).search(text, at)
            if found is None:
                return
            at = found.end()
            if found[0] == '"':
                self.quoted = not self.quoted
            elif found[0] == "\\":
                self._escaped, at = at == len(text), at + 1
            else:
                self.quoted, self.broken = False, True
