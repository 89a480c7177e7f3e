"""Renders messages into token ids through the chat template. Ids that are stored never change.

A first prompt is rendered whole. For a later one, only what the template writes after the stored path is rendered: the
end of the answer if sampling stopped before it, the template's text between turns, the new messages and the generation
prompt. This requires that the template still writes the path as before: its text begins with the prompt that was
answered and continues with the answer, as it was sampled or in another spelling (such as other spaces in JSON). If the
template drops a part of that, such as the reasoning or a generation prompt, it *rewrites* the answer. `after_answer`
then returns None and the caller forks from the last prompt that is still written as before; with `history="append"` the
new messages are appended to what was sampled.

The whole text is not rendered at every turn. Probes in the constructor find out whether a template is

* *append-only*: no message changes how an earlier one is written. New messages are rendered after a stand-in for the
  history, in time that does not grow with the history;
* *near*: the same holds for an answer and the tool results after it. A template that drops old reasoning does so when a
  question comes, not between the tool calls of an agent.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import msgspec

from rillflow.config import PolicyConfig
from rillflow.errors import BadRequest, ConfigError
from rillflow.gateway.trees.messages import REASONING, AnswerReading, Body, Message, same_words
from rillflow.gateway.trees.probes import (
    ARGUMENT,
    RESULT,
    STAND_IN,
    STAND_IN_CALLING,
    Traits,
    only_results,
    result,
    traits_of,
)
from rillflow.gateway.trees.template import ChatTemplate, Tools
from rillflow.gateway.trees.tokens import Tokens
from rillflow.gateway.trees.tree import Canonical
from rillflow.weights.model_folder import model_folder
from rillflow.weights.models import load_tokenizer

History = Literal["template", "append"]

_CACHED_PROMPTS = 512
_CACHED_BYTES = 1 << 16  # of the messages and tools of a cached prompt
_VARIANTS = 16  # sets of options of calls whose renderers are kept
_DIGEST = 16
_PROMPT_END = 64  # characters at the end of a prompt in which it may open the reasoning
_MARK = "qmark0q"


class Rendered(NamedTuple):
    """Ids to add to a path. `canonical` is that of the extended path, if later extensions are compared with it.

    Sessions share cached instances, which must not be changed.
    """

    tokens: array[int]
    canonical: Canonical | None


class Ending(NamedTuple):
    """The text and the id of the token that ends an answer; empty if the template has none."""

    text: str = ""
    token: int | None = None


class Renderer(Tokens):
    """One policy's tokenizer and chat template, for any thread.

    `stop_tokens` end an answer; they include the end of a turn. Without `probed`, every extension is compared with the
    whole text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_tokens: Iterable[int] = (),
        *,
        template: ChatTemplate | None = None,
        history: History = "template",
        probed: bool = True,
    ) -> None:
        super().__init__(tokenizer)
        self.template = template or ChatTemplate(tokenizer)
        self.history = history
        self._prompts: OrderedDict[bytes, Rendered] = OrderedDict()
        self._prompts_lock = Lock()
        self._variants: OrderedDict[bytes, Renderer] = OrderedDict()
        eos = tokenizer.eos_token_id
        self._given_stops = tuple(stop_tokens)
        self._find_ends([*([] if eos is None else [eos]), *self._given_stops])
        self._traits = traits_of(self) if probed else Traits()
        self.append_only, self.near = self._traits.append_only, self._traits.near

    @classmethod
    def load(
        cls,
        model: str,
        *,
        chat_template: str | None = None,
        options: Mapping[str, Any] | None = None,
        history: History = "template",
    ) -> Renderer:
        """Load the renderer of a model. `chat_template` is a file that replaces the model's own template.

        The model's generation config may name more stop tokens than its tokenizer.
        """
        config = model_folder(model) / "generation_config.json"
        stops = msgspec.json.decode(config.read_bytes()).get("eos_token_id") if config.exists() else None
        tokenizer = load_tokenizer(model)
        template = ChatTemplate(tokenizer, _source(chat_template), options)
        return cls(tokenizer, [stops] if isinstance(stops, int) else stops or (), template=template, history=history)

    def variant(self, options: Mapping[str, Any]) -> Renderer:
        """Return this renderer with the additional template options of one call."""
        if not options:
            return self
        key = msgspec.json.encode(options, order="sorted")
        with self._prompts_lock:
            found = self._variants.get(key)
        if found is None:
            template = self.template.variant(options)
            found = Renderer(self._tokenizer, self._given_stops, template=template, history=self.history, probed=False)
        with self._prompts_lock:
            self._variants[key] = found
            self._variants.move_to_end(key)
            if len(self._variants) > _VARIANTS:
                self._variants.popitem(last=False)
        return found

    # ------------------------------------------------------------ rendering

    def first(self, messages: Sequence[Message], tools: Tools, tools_key: bytes) -> Rendered:
        """Return the whole prompt. It is cached, because the episodes of a group begin with the same one."""
        key = _key(b"first", tools_key, messages)
        found = self._kept(key)
        if found is not None:
            return found
        text = self._text(bodies(messages), tools, prompt=True)
        return self._keep(key, self._rendered(text, self._canonical(text)))

    def after_answer(
        self,
        history: Sequence[Message],
        covered: int,
        tools: Tools,
        *,
        said: Sequence[int],
        before: Canonical | None,
        reading: AnswerReading,
    ) -> Rendered | None:
        """Return what follows an answer, which is the last of `covered` messages and was sampled as the ids `said`.

        `before` is the canonical text of the prompt that was answered, if known. The result is None if the template
        rewrites the prompt or the answer.
        """
        last = said[-1] if len(said) and said[-1] in self.stop_tokens else None
        new = bodies(history[covered:])
        if self.append_only and not self._loses(history[covered - 1]):
            # After a stand-in the result depends on the new messages alone.
            key = _key(b"after", b"cut" if last is None else b"%d" % last, history[covered:])
            kept = self._kept(key)
            if kept is not None:
                return kept
            rest = self.after_stand_in(new)
            return None if rest is None else self._keep(key, Rendered(self._ids_behind(rest, last), None))
        answered = _Answered(history[covered - 1], self._text_of(said, last), last, reading)
        told = bodies(history[:covered])
        canonical: Canonical | None = None
        # An answer after another answer may change that one; no probe has two in a row.
        if self.near and only_results(new) and told[-2:-1] and told[-2]["role"] != "assistant":
            told, tools, asked = [STAND_IN[0], told[-1]], self.template.least_tools, self._asked
            whole = self._text([*told, *new], tools, prompt=True)
            at = len(asked) if whole.startswith(asked) else -1
        else:
            before = before or self.canonical(history[: covered - 1], tools)
            whole = self._text([*told, *new], tools, prompt=True)
            at = before.length if canonical_of(whole[: before.length]) == before else -1
            canonical = canonical_of(whole)
        located = partial(self._located, whole, told, new, tools)
        end = self._end_of(answered, whole, at, located)
        if end is None and self.history == "append":
            end, canonical = located(), None
        return None if end is None else Rendered(self._ids_behind(whole[end:], last), canonical)

    def after_prompt(self, new: Sequence[Message]) -> Rendered | None:
        """Return what follows a generation prompt of an append-only template when the agent wrote the answer itself."""
        text = self.after_stand_in(bodies(new), answered=False)
        return None if text is None else self._rendered(text, None)

    def after_prompts(
        self, history: Sequence[Message], tools: Tools, prompts: Sequence[Canonical]
    ) -> tuple[int, Rendered]:
        """Return how many of `prompts` the text of `history` begins with, and what follows the last of these.

        Each prompt is longer than the one before. If none matches, the whole text follows.
        """
        text = self._text(bodies(history), tools, prompt=True)
        state = blake2b(digest_size=_DIGEST)
        at = kept = 0
        for prompt in prompts:
            state.update(text[at : prompt.length].encode())
            if prompt.length > len(text) or state.copy().digest() != prompt.digest:
                break
            at, kept = prompt.length, kept + 1
        return kept, self._rendered(text[at:], self._canonical(text))

    def canonical(self, messages: Sequence[Message], tools: Tools) -> Canonical:
        """Return the canonical text of the prompt for `messages`."""
        return canonical_of(self._text(bodies(messages), tools, prompt=True))

    def text(self, messages: Sequence[Message], tools: Tools, *, prompt: bool) -> str:
        """Return what the template writes for a conversation, with or without the generation prompt."""
        return self._text(bodies(messages), tools, prompt=prompt)

    def _rendered(self, text: str, canonical: Canonical | None) -> Rendered:
        return Rendered(self.ids(text), canonical)

    def _kept(self, key: bytes) -> Rendered | None:
        with self._prompts_lock:
            found = self._prompts.get(key)
            if found is not None:
                self._prompts.move_to_end(key)
            return found

    def _keep(self, key: bytes, rendered: Rendered) -> Rendered:
        if key and len(key) <= _CACHED_BYTES:
            with self._prompts_lock:
                self._prompts[key] = rendered
                if len(self._prompts) > _CACHED_PROMPTS:
                    self._prompts.popitem(last=False)
        return rendered

    # ------------------------------------------------------------ after an answer

    def _end_of(self, answered: _Answered, whole: str, at: int, located: Callable[[], int | None]) -> int | None:
        """Return where in `whole` the answer ends; None if the template rewrites it.

        `whole` has the text of the prompt up to `at` (-1: the prompt is rewritten). `located` finds the end of the turn
        without the sampled text.
        """
        ended_otherwise = answered.last == self._last_end.token and self._last_end not in self._ends
        if at < 0 or (answered.last is not None and ended_otherwise):
            return None
        literal = at + len(answered.text)
        if whole.startswith(answered.text, at) and self._ends_at(whole, literal, answered.last):
            return literal
        end = located()
        if end is None or end < at:
            return None
        message, written = answered.message, whole[at:end]
        # Reasoning that the prompt opened must continue right after it.
        opened = bool(message.reasoning) and answered.text.lstrip().startswith(message.reasoning)
        if opened and not written.lstrip().startswith(message.reasoning):
            return None
        if answered.reading.opening in answered.text and answered.reading.opening not in written:
            return None  # the template drops the markers of empty reasoning, which the message does not show
        read = answered.reading.read(whole[max(at - _PROMPT_END, 0) : at], written, bool(message.call_ids))
        return end if same_words(read, message) else None

    def _ends_at(self, whole: str, at: int, last: int | None) -> bool:
        """Return whether a turn ends at `at`: with the sampled stop token, or with an end of the template."""
        rest = whole[at : at + 200].lstrip()
        texts = [ending.text for ending in self._ends]
        return rest.startswith((*texts, self.decode([last])) if last is not None else tuple(texts))

    def _located(self, whole: str, told: list[Body], new: list[Body], tools: Tools) -> int | None:
        """Return where in `whole` the turn of the last answer ends; None if it cannot be found.

        It is the last end before the text of the first new message, which is found by rendering with a mark in it.
        """
        until = len(whole)
        if new:
            marked = self._text([*told, new[0] | {"content": _MARK + new[0]["content"]}, *new[1:]], tools, prompt=True)
            until = marked.find(_MARK)
            if until < 0 or whole[:until] != marked[:until]:
                return None
        found = max(whole.rfind(ending.text, 0, until) if ending.text else -1 for ending in self._ends)
        return found if found >= 0 else None

    def _ids_behind(self, rest: str, last: int | None) -> array[int]:
        """Return the ids of a text that begins with the end of an answer, without that end if it was sampled."""
        if last is not None and rest.lstrip().startswith(self.decode([last])):
            # Encoded with the end of the turn, so that nothing is tokenised as the beginning of a text.
            return self.ids(rest.lstrip())[1:]
        return self.ids(rest)

    def _text_of(self, said: Sequence[int], last: int | None) -> str:
        return self.decode(said if last is None else said[:-1])

    def _loses(self, answer: Message) -> bool:
        """Return whether an append-only template drops a part of an answer; never with `history="append"`."""
        if not self._traits.drops_words or self.history == "append" or not answer.body.get("tool_calls"):
            return False
        inlined = REASONING in answer.body and not self.template.has_reasoning
        return inlined or bool(answer.body["content"].strip())

    def after_stand_in(self, new: list[Body], *, answered: bool = True) -> str | None:
        """Return what the template writes for `new` after a stand-in, from the end of the stand-in's answer on.

        The result is None if `new` changes the text of the stand-in: the probes cannot try every message, and some
        templates move a late system message to the top.
        """
        if not answered:
            text = self._alone([STAND_IN[0], *new])
            return text[len(self._asked) :] if text.startswith(self._asked) else None
        tool = bool(new) and new[0]["role"] == "tool" and self.template.writes_calls
        history = STAND_IN_CALLING if tool else STAND_IN
        before = self._calling_stand_in if tool else self._stand_in
        text = self._alone([*history, *new])
        return text[len(before) :] if text.startswith(before) else None

    @cached_property
    def _asked(self) -> str:
        return self._alone(STAND_IN[:1])

    @cached_property
    def _stand_in(self) -> str:
        """The text of the stand-in for a history, up to the end of its answer."""
        text = self._alone([*STAND_IN, {"role": "user", "content": RESULT}])
        said = STAND_IN[1]["content"]
        return text[: self._next_end(text, text.rindex(said) + len(said), text.rindex(RESULT))]

    @cached_property
    def _calling_stand_in(self) -> str:
        text = self._alone([*STAND_IN_CALLING, result(RESULT)])
        return text[: self._next_end(text, text.rindex(ARGUMENT) + len(ARGUMENT), text.rindex(RESULT))]

    def _next_end(self, text: str, start: int, until: int) -> int:
        """Return where the first end of an answer begins, from `start` on; `start` itself without one."""
        found = [text.find(ending.text, start, until) for ending in self._ends if ending.text]
        return min((at for at in found if at >= 0), default=start)

    def _canonical(self, text: str) -> Canonical | None:
        return None if self.append_only else canonical_of(text)

    def _text(self, messages: list[Body], tools: Tools, *, prompt: bool) -> str:
        return self.template.text(messages, tools, prompt=prompt)

    def _alone(self, messages: list[Body], *, prompt: bool = True) -> str:
        """Return the text of messages that stand in for a conversation."""
        return self._text(messages, self.template.least_tools, prompt=prompt)

    # ------------------------------------------------------------ properties of the template

    def _find_ends(self, stops: list[int]) -> None:
        """Find the tokens that end an answer, with and without tool calls, when more messages follow."""
        said = STAND_IN[1]["content"]
        last = self._alone(STAND_IN, prompt=False).rpartition(said)[2]
        try:
            followed = self._alone([*STAND_IN, {"role": "user", "content": RESULT}])
            tail = followed[followed.rindex(said) + len(said) : followed.rindex(RESULT)]
        except BadRequest:
            tail = last
        self._last_end = self._ending(last, stops)
        plain = self._ending(tail, stops)
        # A token that ends an answer only in the middle of a conversation is not a stop token.
        if plain.text in last or self._last_end.token not in stops:
            stops = [*stops, *([] if plain.token is None else [plain.token])]
        calling = self._ending(self.template.written_call.rpartition(ARGUMENT)[2], stops)
        stops = [*stops, *([] if calling.token is None else [calling.token])]
        self.end_text, self.end_token = plain
        self._ends = (plain, calling) if calling.text else (plain,)
        self.stop_tokens = tuple(dict.fromkeys(stops))

    def _ending(self, tail: str, stops: list[int]) -> Ending:
        """Return the first stop token in the text after an answer; else its first special token."""
        ids = self.encode(tail)
        ends = [id for id in ids if id in stops] or [id for id in ids if id in self._tokenizer.all_special_ids]
        return Ending(self.decode(ends[:1]), ends[0]) if ends else Ending()

    def continued(self, told: list[Body], new: list[Body], tools: Tools) -> str | None:
        """Return what the template writes after the prompt of the last answer in a history, for the probes.

        The result is None if the prompt changes. With `history="append"`, tool results are returned all the same.
        """
        asked = self._text(told[:-1], tools, prompt=True)
        whole = self._text([*told, *new], tools, prompt=True)
        if whole.startswith(asked):
            return whole[len(asked) :]
        if self.history != "append" or not only_results(new):
            return None
        end = self._located(whole, told, new, tools)
        return None if end is None else whole[end:]


class _Answered(NamedTuple):
    """A sampled answer: its message, its text without the stop token `last`, and how that text was read."""

    message: Message
    text: str
    last: int | None
    reading: AnswerReading


def load_renderer(policy: PolicyConfig) -> Renderer:
    """Return the renderer of a recipe's policy."""
    return Renderer.load(
        policy.model,
        chat_template=policy.chat_template,
        options=policy.chat_template_kwargs,
        history=policy.history,
    )


def _source(chat_template: str | None) -> str | None:
    if chat_template is None:
        return None
    try:
        return Path(chat_template).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {chat_template} cannot be read: {error}", "check the path") from error


def _key(kind: bytes, detail: bytes, messages: Sequence[Message]) -> bytes:
    """Return a cache key of everything that the template sees; ids of calls are not in the messages' own keys."""
    return b"\n".join((kind, detail, msgspec.json.encode(bodies(messages))))


def bodies(messages: Sequence[Message]) -> list[Body]:
    return [message.body for message in messages]


def canonical_of(text: str) -> Canonical:
    return Canonical(len(text), blake2b(text.encode(), digest_size=_DIGEST).digest())
