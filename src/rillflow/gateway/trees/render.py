"""Messages to token ids through the tokenizer's chat template, without ever touching ids that are already stored.

A first prompt is rendered whole. A later one is rendered as what the template writes after the stored path: the end
of the answer where sampling was cut before it, the template's text between turns, the new messages and the
generation prompt. That is possible where the template is *append-only*, that is where a message never changes how
an earlier one is written. Probes at construction tell the two kinds of templates apart:

* append-only on every probe: new messages are rendered behind a stand-in for the history, in time that does not
  grow with it;
* otherwise the whole text is rendered and compared with the stored path's; where it begins with it the rest is
  taken, where it does not (`after_answer` gives None) the caller forks from the last prompt that it begins with;
* of those, many are *near* where tools' results follow an answer: whether it stays as it is, and what comes behind,
  depends on the answer alone. A template that drops old reasoning does so when a question comes, not within the
  turns of an agent with its tools, so that these too take a time that does not grow.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from rillflow.errors import BadRequest, ConfigError
from rillflow.gateway.trees.messages import Body, Message
from rillflow.gateway.trees.probes import PROBES, STAND_IN, STAND_IN_CALLING, Probe
from rillflow.gateway.trees.tokenising import encode_apart
from rillflow.gateway.trees.tree import Canonical
from rillflow.weights.model_folder import model_folder
from rillflow.weights.models import load_tokenizer

Tools = list[Body] | None

_CACHED_PROMPTS = 512
_CACHED_BYTES = 1 << 16  # of the messages and tools of one cached prompt
_DIGEST = 16
_APART = 256 << 10  # characters that are tokenised in this process
_MANY_IDS = 4096
_REASONING = "reasoning_content"


class Rendered(NamedTuple):
    """Ids to add to a path; `canonical` of the path with them, where later extensions must be compared with it.

    Sessions share what is kept for the next that asks the same: nobody changes it.
    """

    tokens: array[int]
    canonical: Canonical | None


class Renderer:
    """One policy's tokenizer and chat template, which any thread may use. `stop_tokens` end an answer; they include
    the end of a turn."""

    def __init__(self, tokenizer: Any, stop_tokens: Iterable[int] = ()) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError("the tokenizer has no chat template", "add chat_template.jinja to the model's folder")
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        written = tokenizer.chat_template  # a tokenizer may have several, by name
        self.template = written if isinstance(written, str) else "\n".join(written.values())
        self._prompts: OrderedDict[bytes, Rendered] = OrderedDict()
        self._prompts_lock = Lock()
        self._stand_ins: dict[tuple[int, bool], str] = {}
        self._written = ""  # the tokenizer as JSON, once it is needed
        self._longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        # Asked once: this way of encoding sets the tokenizer up, which no thread may do while another one encodes.
        opened = list(tokenizer.encode("", add_special_tokens=True))[:1]
        self._opening = opened if opened == [tokenizer.bos_token_id] else []
        eos = tokenizer.eos_token_id
        stops = [*([] if eos is None else [eos]), *stop_tokens]
        self.end_text, self.end_token, self._gap = self._turn_end(stops)
        self.stop_tokens = tuple(dict.fromkeys(stops + ([] if self.end_token is None else [self.end_token])))
        self.append_only = all(self._passes(probe) for probe in PROBES)
        self.near = all(self._is_near(probe) for probe in PROBES if _only_results(probe.new))

    @classmethod
    def load(cls, model: str) -> Renderer:
        """Of a policy's model; its generation config may name more stop tokens than the tokenizer."""
        config = model_folder(model) / "generation_config.json"
        stops = msgspec.json.decode(config.read_bytes()).get("eos_token_id") if config.exists() else None
        return cls(load_tokenizer(model), [stops] if isinstance(stops, int) else stops or ())

    # ------------------------------------------------------------ ids and text

    def encode(self, text: str) -> list[int]:
        if self._backend is not None:
            # Of the ways to encode one text, this one lets other threads run meanwhile.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def ids(self, text: str) -> array[int]:
        """As `encode`, for texts of any length."""
        if self._backend is None or len(text) <= _APART:
            return array("i", self.encode(text))
        if not self._written:
            self._written = self._backend.to_str()
        return encode_apart(self._written, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are text here: tool-call markers are often special."""
        if self._backend is not None and len(ids) > _MANY_IDS:  # as slow, but it lets other threads run
            return str(self._backend.decode_batch([ids], skip_special_tokens=False)[0])
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        return str(
            self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        )

    def opening(self, text: str) -> list[int]:
        """The ids that the tokenizer puts before a text of its own, unless the text begins with them already."""
        return self._opening if self._opening and not text.startswith(self._tokenizer.bos_token) else []

    def characters_of(self, tokens: int) -> int:
        """Return a number of characters that no text of `tokens` tokens has: twice what the longest token would give,
        for tokenizers that drop some of a text."""
        return tokens * 2 * self._longest

    @property
    def vocabulary(self) -> int:
        """How many ids the tokenizer knows."""
        return len(self._tokenizer)

    # ------------------------------------------------------------ rendering

    def first(self, messages: Sequence[Message], tools: Tools, tools_key: bytes) -> Rendered:
        """The whole prompt. The episodes of a group begin with the same one."""
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
        last_token: int | None,
        before: Canonical | None,
    ) -> Rendered | None:
        """What follows a sampled answer, the last of `covered` messages, whose last id was `last_token`.

        `before` is the canonical text of the prompt that was answered, where it is known. None where the template
        rewrites it. Of an append-only template's history, only what is not covered matters.
        """
        ended = self.end_token is not None and last_token == self.end_token
        # Behind a stand-in the new messages say it all; compared with the history, nothing can be kept.
        key = _key(b"after", b"ended" if ended else b"cut", history[covered:]) if self.append_only else b""
        kept = self._kept(key)
        if kept is not None:
            return kept
        found = self._suffix(history, covered, tools, before)
        if found is None:
            return None
        text, canonical = found
        # Encoded together with the end of the turn, so that nothing is tokenised as the beginning of a text.
        ids = self.ids(self.end_text + self._gap + text)
        return self._keep(key, Rendered(ids[1:] if ended else ids, canonical))

    def after_prompt(self, new: Sequence[Message]) -> Rendered | None:
        """What follows any generation prompt of an append-only template when the agent wrote the answer itself."""
        text = self._behind_stand_in(bodies(new), answered=False)
        return None if text is None else self._rendered(text, None)

    def after_prompts(
        self, history: Sequence[Message], tools: Tools, prompts: Sequence[Canonical]
    ) -> tuple[int, Rendered]:
        """How many of `prompts`, each longer than the one before, the text of `history` begins with, and what follows
        the last of these: the whole text where there are none."""
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
        """Of the prompt for `messages`."""
        return canonical_of(self._text(bodies(messages), tools, prompt=True))

    def text(self, messages: Sequence[Message], tools: Tools, *, prompt: bool) -> str:
        """What the template writes for a conversation, with the generation prompt behind it or without."""
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

    def _suffix(
        self, history: Sequence[Message], covered: int, tools: Tools, before: Canonical | None
    ) -> tuple[str, Canonical | None] | None:
        if self.append_only:
            text = self._behind_stand_in(bodies(history[covered:]), answered=True)
            return None if text is None else (text, None)
        told, new = bodies(history[:covered]), bodies(history[covered:])
        # An answer behind another answer may change that one: no probe has asked twice.
        if self.near and _only_results(new) and told[-2:-1] and told[-2]["role"] != "assistant":
            text = self._behind([STAND_IN[0], told[-1]], new, None)
            return None if text is None else (text, None)
        before = before or self.canonical(history[: covered - 1], tools)
        old = self._text(told, tools, prompt=False)
        whole = self._text([*told, *new], tools, prompt=True)
        kept = canonical_of(old[: before.length]) == before and whole.startswith(old)
        if not kept or not old.endswith(self.end_text + self._gap):
            return None
        return whole[len(old) :], self._canonical(whole)

    def _behind(self, told: list[Body], new: list[Body], tools: Tools) -> str | None:
        """What the template writes for `new` behind `told`, which ends with an answer; None where that changes it."""
        asked = self._text(told[:-1], tools, prompt=True)
        old = self._text(told, tools, prompt=False)
        whole = self._text([*told, *new], tools, prompt=True)
        kept = old.startswith(asked) and whole.startswith(old) and old.endswith(self.end_text + self._gap)
        return whole[len(old) :] if kept else None

    def _behind_stand_in(self, new: list[Body], *, answered: bool) -> str | None:
        """What the template writes for `new` behind a stand-in; None where `new` changes the stand-in's own text.

        The probes cannot try every message: some templates move a late system message to the top.
        """
        if not answered:
            history = STAND_IN[:1]
        elif new and new[0]["role"] == "tool":
            history = STAND_IN_CALLING
        else:
            history = STAND_IN
        text = self._text([*history, *new], None, prompt=True)
        before = self._stand_in_text(history, prompt=not answered)
        return text[len(before) :] if text.startswith(before) else None

    def _stand_in_text(self, history: list[Body], *, prompt: bool) -> str:
        key = (len(history), history is STAND_IN_CALLING)
        if key not in self._stand_ins:
            self._stand_ins[key] = self._text(history, None, prompt=prompt)
        return self._stand_ins[key]

    def _canonical(self, text: str) -> Canonical | None:
        return None if self.append_only else canonical_of(text)

    def _text(self, messages: list[Body], tools: Tools, *, prompt: bool) -> str:
        if _REASONING not in self.template:
            messages = [_inline(body) if _REASONING in body else body for body in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
            )
        except Exception as error:  # a template is code of the model's authors and may raise anything
            raise BadRequest(f"the chat template cannot write these messages: {error}") from error

    # ------------------------------------------------------------ what kind of template this is

    def _turn_end(self, stops: list[int]) -> tuple[str, int | None, str]:
        """The text and id that end an answer, and the text between it and the next turn."""
        said = STAND_IN[1]["content"]
        text = self._text(STAND_IN, None, prompt=False)
        tail = text[text.rindex(said) + len(said) :]
        ids = self.encode(tail)
        if ids and (ids[0] in stops or ids[0] in self._tokenizer.all_special_ids):
            end = self.decode(ids[:1])
            if end and tail.startswith(end):
                return end, ids[0], tail[len(end) :]
        return "", None, tail

    def _passes(self, probe: Probe) -> bool:
        """Whether a stand-in for the history gives what the whole history gives, for one shape of conversation."""
        try:
            asked = self._text(probe.history[:-1], probe.tools, prompt=True)
            behind = self._behind(probe.history, probe.new, probe.tools)
            whole = self._text([*probe.history, *probe.new], probe.tools, prompt=True)
        except BadRequest:
            return True  # a shape that the template refuses never comes up
        if behind is None:
            return False
        return self._same(behind, probe.new, answered=True) and self._same(
            whole[len(asked) :], [probe.history[-1], *probe.new], answered=False
        )

    def _is_near(self, probe: Probe) -> bool:
        """Whether an answer behind a stand-in for all before it is continued, or rewritten, as in the whole history."""
        try:
            whole = self._behind(probe.history, probe.new, probe.tools)
        except BadRequest:
            return True
        try:
            return self._behind([STAND_IN[0], probe.history[-1]], probe.new, None) == whole
        except BadRequest:
            return False

    def _same(self, expected: str, new: list[Body], *, answered: bool) -> bool:
        try:
            return self._behind_stand_in(new, answered=answered) == expected
        except BadRequest:
            return False


def _key(kind: bytes, detail: bytes, messages: Sequence[Message]) -> bytes:
    """Of everything that the template sees, which is more than the messages' own keys: ids of calls, say."""
    return b"\n".join((kind, detail, msgspec.json.encode(bodies(messages))))


def _only_results(new: list[Body]) -> bool:
    return bool(new) and all(body["role"] == "tool" for body in new)


def _inline(body: Body) -> Body:
    """With the reasoning where a template that knows no field for it may look for it, or leave it: in the text."""
    text = f"<think>\n{body[_REASONING]}\n</think>\n\n{body['content']}"
    return {name: value for name, value in body.items() if name != _REASONING} | {"content": text}


def bodies(messages: Sequence[Message]) -> list[Body]:
    return [message.body for message in messages]


def canonical_of(text: str) -> Canonical:
    return Canonical(len(text), blake2b(text.encode(), digest_size=_DIGEST).digest())
