"""Reasoning in sampled text: what stands between `<think>` and `</think>`, told apart from the answer.

The same parts come out however the text is cut. Blank text next to the markers is layout and dropped. Templates that
open the reasoning themselves leave the answer to begin inside it. Reasoning that is never closed stays reasoning.
"""

from __future__ import annotations

from typing import NamedTuple

from rillflow.gateway.reading.stops import held_back

OPEN, CLOSE = "<think>", "</think>"


class Thought(NamedTuple):
    """A piece of reasoning."""

    text: str


class ReasoningSplit:
    """Splits text, piece by piece, into thoughts and answer. `inside`: the prompt has opened the reasoning."""

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        self._held = ""
        self._blank = inside  # whether blank text at this place is layout
        self._begun = inside  # whether anything but blank text has come

    def feed(self, text: str) -> list[str | Thought]:
        parts: list[str | Thought] = []
        self._held += text
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[str | Thought]:
        parts: list[str | Thought] = []
        self._emit(self._held.rstrip() if self._inside else self._held, parts)
        self._held = ""
        return parts

    def _advance(self, parts: list[str | Thought]) -> bool:
        marker = CLOSE if self._inside else OPEN
        before, found, after = self._held.partition(marker)
        if found:
            if self._begun or before.strip():
                self._emit(before.rstrip() if self._inside else before, parts)
            self._inside, self._blank, self._begun, self._held = not self._inside, True, True, after
            return True
        ready = self._held[: len(self._held) - held_back(self._held, (marker,))]
        if not self._begun and not ready.strip():
            return False
        self._begun = True
        if self._inside:
            ready = ready.rstrip()  # blank text may yet be followed by the closing marker
        self._emit(ready, parts)
        self._held = self._held[len(ready) :]
        return False

    def _emit(self, text: str, parts: list[str | Thought]) -> None:
        if self._blank:
            text = text.lstrip()
        if text:
            self._blank = False
            parts.append(Thought(text) if self._inside else text)


def reasons(asked: str, template: str) -> bool:
    """Whether a policy's model reasons between markers: as `asked`, or as its chat template shows."""
    return asked == "think" or (asked == "auto" and CLOSE in template)


def opened_by(prompt: str) -> bool:
    """Whether a prompt that ends so has opened the reasoning itself."""
    return prompt.rstrip().endswith(OPEN)
