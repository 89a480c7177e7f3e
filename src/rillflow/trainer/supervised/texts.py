"""Conversations and texts become tokens, with the trained or scored tokens marked.

All text of supervised training and of reward models, in training and in use, is built here. If a template rewrites
earlier turns (it drops old reasoning, for example), a conversation becomes several rows, as in the gateway.

Invariants: the trained tokens are those that a policy would have to sample: the tokens between the template's
generation prompt and the end of the turn, including that end; a context is written as the template writes it when it
asks for the answer after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from rillflow.errors import DataError, RillflowError
from rillflow.gateway.trees.messages import Message, message
from rillflow.gateway.trees.render import Renderer
from rillflow.weights.models import load_tokenizer

Tools = list[dict[str, Any]] | None
Saying = str | Sequence[Message]
_ASSISTANT = "assistant"


@dataclass
class Written:
    """The tokens of a row; `marked` are the places of the trained or scored tokens. The first `begun` tokens of a row
    of steps are its question."""

    tokens: list[int] = field(default_factory=list)
    marked: list[int] = field(default_factory=list)
    begun: int = 0

    def add(self, tokens: Sequence[int], *, trained: bool) -> None:
        if trained:
            self.marked += range(len(self.tokens), len(self.tokens) + len(tokens))
        self.tokens += tokens

    def mark_last(self) -> None:
        self.marked.append(len(self.tokens) - 1)


class Writer:
    """Writes with one model's tokenizer. Only messages need a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model: str) -> Writer:
        return cls(load_tokenizer(model))

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self._tokenizer)

    # ------------------------------------------------------------ answers to learn

    def completion(self, prompt: str, completion: str) -> Written:
        """Return a text and its continuation, which is trained with the end token."""
        row = Written()
        row.add(self._opening(prompt) + self._encode(prompt), trained=False)
        row.add(self._encode(completion) + self._end(completion), trained=True)
        return row

    def conversation(self, messages: Sequence[Message], tools: Tools, *, last: bool, where: str) -> list[Written]:
        """Return the rows that train its assistant messages, or only the last of them."""
        places = [place for place, said in enumerate(messages) if said.role == _ASSISTANT]
        if not places:
            raise DataError(f"{where}: no message is the assistant's", "add one to learn from")
        rows: list[Written] = []
        before = ""
        for place in places[-1:] if last else places:
            asked = self._text(messages[:place], tools, prompt=True, where=where)
            said = self._text(messages[: place + 1], tools, prompt=False, where=where)
            if not said.startswith(asked):
                raise DataError(
                    f"{where}: the chat template does not write message {place} after its generation prompt",
                    "give this row as texts, `prompt` and `completion`",
                )
            if not rows or not asked.startswith(before):
                rows.append(Written())
                before = ""
            before = asked + self._answer(rows[-1], asked[len(before) :], said[len(asked) :])
        return rows

    def _answer(self, row: Written, asked: str, said: str) -> str:
        """Add a context and the answer after it; return the part of the answer up to the end of its turn."""
        context = self._behind_end(row, asked)
        end = said.rfind(self._renderer.end_text) + len(self._renderer.end_text)
        if self._renderer.end_text and end and not said[end:].strip():
            said = said[:end]  # text that the template writes between turns is not sampled
        row.add(context, trained=False)
        row.add(self._behind(asked, context, said), trained=True)
        return said

    def _behind_end(self, row: Written, text: str) -> list[int]:
        """Encode a text together with the end of the turn before it, as the gateway does."""
        if not row.tokens or self._renderer.end_token is None or row.tokens[-1] != self._renderer.end_token:
            return self._encode(text)
        return self._encode(self._renderer.end_text + text)[1:]

    def _behind(self, context: str, ids: list[int], text: str) -> list[int]:
        """Return the ids of a text in its place: some tokenizers encode the beginning of a text differently."""
        whole = self._encode(context + text)
        return whole[len(ids) :] if whole[: len(ids)] == ids else self._encode(text)

    # ------------------------------------------------------------ texts to score

    def scored(self, prompt: Saying | None, answer: Saying, tools: Tools, where: str) -> Written:
        """Return a whole text, scored at its last token. Texts end with the tokenizer's end token, conversations as
        their template ends them; an answer in text after messages is the assistant's."""
        row = Written()
        if isinstance(answer, str) and (prompt is None or isinstance(prompt, str)):
            prompt = prompt or ""
            row.add(self._opening(prompt or answer), trained=False)
            row.add(self._encode(prompt) + self._encode(answer) + self._end(answer), trained=False)
        else:
            messages = [*_messages(prompt or (), "user"), *_messages(answer, _ASSISTANT)]
            row.add(self._encode(self._text(messages, tools, prompt=False, where=where)), trained=False)
        row.mark_last()
        return row

    def steps(self, prompt: Saying, steps: Sequence[Saying], tools: Tools, separator: str, where: str) -> Written:
        """Return a question and steps towards its answer, scored at the last token of each step. Each step in text is
        followed by the separator; such steps follow the generation prompt if the question is messages."""
        row = Written()
        if all(isinstance(step, str) for step in steps):
            begun = prompt if isinstance(prompt, str) else self._text(prompt, tools, prompt=True, where=where)
            row.add((self._opening(begun) if begun is prompt else []) + self._encode(begun), trained=False)
            pieces = [f"{step}{separator}" for step in steps]
        else:
            begun, *pieces = self._message_steps(prompt, steps, tools, where)
            row.add(self._encode(begun), trained=False)
        row.begun = len(row.tokens)
        for number, piece in enumerate(pieces):
            tokens = self._encode(piece)
            if not tokens:
                raise DataError(f"{where}: step {number} is empty", "remove it, or give it a text")
            row.add(tokens, trained=False)
            row.mark_last()
        return row

    def _message_steps(self, prompt: Saying, steps: Sequence[Saying], tools: Tools, where: str) -> list[str]:
        """Return the texts of the question and of each step, as the template writes them one after the other."""
        if isinstance(prompt, str) or any(isinstance(step, str) for step in steps):
            raise DataError(f"{where}: it mixes text and messages", "give the question and all steps in one form")
        told = list(prompt)
        texts = [self._text(told, tools, prompt=False, where=where)]
        for number, step in enumerate(steps):
            told += step  # type: ignore[arg-type]  # messages: see above
            texts.append(self._text(told, tools, prompt=False, where=where))
            if not texts[-1].startswith(texts[-2]):
                raise DataError(
                    f"{where}: after step {number} the chat template rewrites earlier steps",
                    "give the steps as text",
                )
        return [texts[0], *(later[len(text) :] for text, later in pairwise(texts))]

    # ------------------------------------------------------------ ids

    def _text(self, messages: Sequence[Message], tools: Tools, *, prompt: bool, where: str) -> str:
        try:
            return self._renderer.text(messages, tools, prompt=prompt)
        except RillflowError as error:
            raise DataError(f"{where}: {error.message}", error.hint or "change the row, or give it as text") from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _opening(self, text: str) -> list[int]:
        bos = self._tokenizer.bos_token_id
        adds = bos is not None and list(self._tokenizer.encode("", add_special_tokens=True))[:1] == [bos]
        return [bos] if adds and not text.startswith(self._tokenizer.bos_token) else []

    def _end(self, text: str) -> list[int]:
        """Return the end token, unless the text ends with it."""
        end = self._tokenizer.eos_token_id
        return [] if end is None or text.endswith(self._tokenizer.eos_token) else [end]


def _messages(said: Saying, role: str) -> Sequence[Message]:
    return [message(role, said)] if isinstance(said, str) else said
