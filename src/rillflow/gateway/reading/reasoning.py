"""Reasoning in sampled text: one class for each format in which models write it.

The parts do not depend on how the text is cut. Blank text next to the markers is layout and is dropped. If the chat
template opens the reasoning, the answer begins inside it. Reasoning that is never closed stays reasoning.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

from rillflow.gateway.reading.incremental import held_back


class Thought(NamedTuple):
    """A piece of reasoning."""

    text: str


class Splitter(Protocol):
    """Splits text, piece by piece, into thoughts and answer."""

    def feed(self, text: str) -> list[str | Thought]: ...

    def finish(self) -> list[str | Thought]:
        """Return what was held back; the text has ended."""


class ReasoningFormat:
    """How a model writes its reasoning. Derive your own format from this class; its constructor takes no arguments.

    The reasoning stands between `open` and `close`. `lead` follows it, before a call or an answer. An answer stands
    between the two texts of `answer`.
    """

    open: ClassVar[str]
    close: ClassVar[str]
    lead: ClassVar[str] = ""
    answer: ClassVar[tuple[str, str]] = ("", "")

    def splitter(self, *, inside: bool) -> Splitter:
        """Return a splitter for one answer. `inside`: the prompt has opened the reasoning."""
        return ReasoningSplit(self, inside=inside)

    def opened_by(self, prompt: str) -> bool:
        """Return whether a prompt with this end has opened the reasoning."""
        return prompt.rstrip().endswith(self.open)

    def shown_by(self, template: str) -> bool:
        """Return whether a chat template uses this format."""
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
    """Command R7B and A: `<|START_THINKING|>…<|END_THINKING|>`; the answer has its own markers."""

    open, close = "<|START_THINKING|>", "<|END_THINKING|>"
    answer = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class ReasoningSplit:
    """Splits at the opening and the closing marker of a format."""

    def __init__(self, format: ReasoningFormat, *, inside: bool) -> None:
        self._format = format
        self._layout = tuple(filter(None, format.answer))
        self._inside = inside
        self._held = ""
        self._blank = inside  # blank text at this place is layout
        self._begun = inside  # more than blank text has come

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
    """gpt-oss: the channel `analysis` is reasoning. The rest is the answer, in which the tool parser finds calls."""

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
    """Splits an answer into its messages: a head, `<|message|>`, and text up to the end of the message.

    A message with a recipient is a call and stays as it is, with its head.
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
        self._in_head = self._thinks = False  # the model writes plain text without heads
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
