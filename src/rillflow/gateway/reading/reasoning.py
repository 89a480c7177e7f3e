"""Reasoning in sampled text, told apart from the answer: one class for each way in which models write it.

The same parts come out however the text is cut. Blank text next to the markers is layout and dropped. Templates that
open the reasoning themselves leave the answer to begin inside it. Reasoning that is never closed stays reasoning.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

from rillflow.gateway.reading.stops import held_back


class Thought(NamedTuple):
    """A piece of reasoning."""

    text: str


class Splitter(Protocol):
    """Splits text, piece by piece, into thoughts and answer."""

    def feed(self, text: str) -> list[str | Thought]: ...

    def finish(self) -> list[str | Thought]:
        """The text has ended: decide about what was held back."""


class ReasoningFormat:
    """How a model writes its reasoning. A class of your own derives from this one; it is made without arguments.

    The reasoning stands between `open` and `close`. `lead` follows it before a call or an answer; an answer stands
    between the two texts of `answer`.
    """

    open: ClassVar[str]
    close: ClassVar[str]
    lead: ClassVar[str] = ""
    answer: ClassVar[tuple[str, str]] = ("", "")

    def splitter(self, *, inside: bool) -> Splitter:
        """Return what splits one answer; `inside`: the prompt has opened the reasoning."""
        return ReasoningSplit(self, inside=inside)

    def opened_by(self, prompt: str) -> bool:
        """Return whether a prompt that ends so has opened the reasoning itself."""
        return prompt.rstrip().endswith(self.open)

    def shown_by(self, template: str) -> bool:
        """Return whether a chat template is of a model that reasons so."""
        return self.close in template


class Think(ReasoningFormat):
    """Qwen3, DeepSeek, GLM, MiniMax, Nemotron and most others: `<think>…</think>`."""

    open, close = "<think>", "</think>"


class SeedThink(ReasoningFormat):
    """Seed-OSS: `<seed:think>…</seed:think>`."""

    open, close = "<seed:think>", "</seed:think>"

    def shown_by(self, template: str) -> bool:
        return self.open in template


class MistralThink(ReasoningFormat):
    """Magistral: `[THINK]…[/THINK]`."""

    open, close = "[THINK]", "[/THINK]"


class CommandThink(ReasoningFormat):
    """Command R7B and A: `<|START_THINKING|>…<|END_THINKING|>`, and the answer between markers of its own."""

    open, close = "<|START_THINKING|>", "<|END_THINKING|>"
    answer = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class ReasoningSplit:
    """Splits at the markers of a format with an opening and a closing one."""

    def __init__(self, format: ReasoningFormat, *, inside: bool) -> None:
        self._format = format
        self._layout = tuple(filter(None, format.answer))
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
        markers = (self._format.close,) if self._inside else (self._format.open, *self._layout)
        found = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            before, after = self._held[:at], self._held[at + len(marker) :]
            if self._begun or before.strip():
                self._emit(before.rstrip() if self._inside else before, parts)
            self._blank = self._begun = True
            self._inside, self._held = marker == self._format.open, after
            return True
        ready = self._held[: len(self._held) - held_back(self._held, markers)]
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


class Harmony(ReasoningFormat):
    """gpt-oss: channels. The analysis is reasoning, the rest is the answer; calls are left to the tools' parser."""

    open, close = "<|channel|>analysis<|message|>", "<|end|>"
    lead = "<|start|>assistant"
    answer = ("<|channel|>final<|message|>", "")

    def splitter(self, *, inside: bool) -> Splitter:
        return HarmonySplit(inside=inside)

    def shown_by(self, template: str) -> bool:
        return "<|channel|>analysis" in template


_MESSAGE, _ENDS = "<|message|>", ("<|end|>", "<|start|>", "<|call|>", "<|return|>")
_HEADS = ("<|start|>", "<|channel|>", " to=", "assistant", "<|constrain|>")
_LONGEST_HEAD = 400


class HarmonySplit:
    """Follows the messages of an answer: a head, `<|message|>`, and text up to the message's end.

    The text of a message with a recipient is a call: it stays as it is, head and all.
    """

    def __init__(self, *, inside: bool) -> None:
        self._held = ""
        self._in_head = not inside
        self._thinks = inside

    def feed(self, text: str) -> list[str | Thought]:
        parts: list[str | Thought] = []
        self._held += text
        while self._head(parts) if self._in_head else self._content(parts):
            pass
        return parts

    def finish(self) -> list[str | Thought]:
        parts: list[str | Thought] = []
        self._emit(self._held, parts)
        self._held = ""
        return parts

    def _head(self, parts: list[str | Thought]) -> bool:
        head, marker, rest = self._held.partition(_MESSAGE)
        if marker and len(head) <= _LONGEST_HEAD:
            called = " to=" in head
            self._thinks = not called and "<|channel|>analysis" in head
            self._in_head, self._held = False, rest
            if called:
                parts.append(head.removeprefix("<|start|>").removeprefix("assistant") + _MESSAGE)
            return True
        may_be = any(start.startswith(self._held) or self._held.startswith(start) for start in _HEADS)
        if may_be and len(self._held) <= _LONGEST_HEAD + len(_MESSAGE):
            return False
        self._in_head = self._thinks = False  # no head: a model that writes plain text
        return bool(self._held)

    def _content(self, parts: list[str | Thought]) -> bool:
        found = [at for end in _ENDS if (at := self._held.find(end)) >= 0]
        if found:
            at = min(found)
            end = next(end for end in _ENDS if self._held.startswith(end, at))
            self._emit(self._held[:at], parts)
            self._held = self._held[at + (0 if end == "<|start|>" else len(end)) :]
            self._in_head = True
            return True
        ready = self._held[: len(self._held) - held_back(self._held, _ENDS)]
        self._emit(ready, parts)
        self._held = self._held[len(ready) :]
        return False

    def _emit(self, text: str, parts: list[str | Thought]) -> None:
        if text:
            parts.append(Thought(text) if self._thinks else text)
