"""Where a JSON value ends, in text that comes in pieces. Only its shape is followed; whether it is valid is another's.

Braces and markers inside strings do not count. A raw line break inside a string is no JSON: the value is `broken`,
which is how a quote that was never closed is noticed before the end of the text.
"""

from __future__ import annotations

import re

_BARE = re.compile(r'["{}\[\]]')
_QUOTED = re.compile(r'["\\\n]')
_OPENING = re.compile('"')


class JsonScan:
    """Follows one object or array; `quoted` while inside a string of it."""

    __slots__ = ("_depth", "_escaped", "broken", "ended", "quoted")

    def __init__(self) -> None:
        self._depth = 0
        self._escaped = False
        self.quoted = False
        self.broken = False
        self.ended = False

    def feed(self, text: str) -> int:
        """Scan on; how many characters of `text` belong to the value: all of them unless it has ended."""
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
    """Follows the strings of JSON that may stand among other text; `quoted` while inside one.

    Behind a raw line break in a string, which no JSON has, nothing counts as quoted any more.
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
