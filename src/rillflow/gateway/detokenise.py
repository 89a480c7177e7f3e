"""Ids to text while they come, never half a character.

A token may hold part of a character's bytes; decoding it alone gives the replacement character. Text is let go only
up to the last whole character, and each step decodes only the few tokens since then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

_HALF = "\ufffd"


class Detokeniser:
    """Text of a growing list of ids; ids in `hidden` (the stop tokens) leave no text."""

    def __init__(self, decode: Callable[[list[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        # Decoded again with each step: `_said` is the text of the first `_known` of them, already let go. One step's
        # ids stay in front of the next, because some decoders write a token differently at the very beginning.
        self._window: list[int] = []
        self._known = 0
        self._said = ""

    def feed(self, ids: Iterable[int]) -> str:
        self._window.extend(id for id in ids if id not in self._hidden)
        text = self._decode(self._window)
        if text.endswith(_HALF):
            return ""
        return self._let_go(text)

    def finish(self) -> str:
        """The ids have ended: half a character stays the replacement character that it decodes to."""
        return self._let_go(self._decode(self._window))

    def _let_go(self, text: str) -> str:
        new = text[len(self._said) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._said = self._decode(self._window) if self._window else ""
        return new
