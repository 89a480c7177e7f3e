"""Ids to text while they come, never half a character.

A token may hold part of a character's bytes; decoding it alone gives the replacement character. Text is let go only
up to the last whole character, and each step decodes only the few tokens since then. Where no whole character comes
for long (a model that samples garbage), the next look is taken only when twice as many have come: the cost of all
looks together stays linear.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

_HALF = "\ufffd"
_WINDOW = 24  # ids that are decoded again with each step, before old ones are dropped
_PATIENCE = 8  # ids without a whole character, after which looks become rarer; a character has at most four


class Detokeniser:
    """Text of a growing list of ids; ids in `hidden` (the stop tokens) leave no text."""

    def __init__(self, decode: Callable[[list[int]], str], hidden: Container[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        # Decoded again with each step: `_said` is the text of the first `_known` of them, already let go. At least one
        # step's ids stay in front of the next: some decoders write a token differently at the very beginning.
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
        return self._let_go(text)

    def finish(self) -> str:
        """The ids have ended: half a character stays the replacement character that it decodes to."""
        return self._let_go(self._decode(self._window)) if len(self._window) > self._known else ""

    def whole(self, ids: Iterable[int]) -> str:
        """The text of ids that come all at once, as `feed` and `finish` would give it."""
        return self._decode([id for id in ids if id not in self._hidden])

    def _let_go(self, text: str) -> str:
        new = text[len(self._said) :]
        if len(self._window) > _WINDOW:
            self._window = self._window[self._known :]
            text = self._decode(self._window)
        self._known = len(self._window)
        self._said = text
        self._look_at = 0
        return new
