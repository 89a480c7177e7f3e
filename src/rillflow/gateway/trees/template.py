"""A policy's chat template with its options.

Messages are adapted to the template. Probes in the constructor find out what it has no place for: reasoning, tool calls
and tool results are then passed as text, because a template silently drops a field that it does not know. Ids of calls
are shortened for templates that insist on nine characters. The date is that of construction, so that no conversation is
rewritten at midnight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from hashlib import blake2b
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
import msgspec
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rillflow.errors import BadRequest, ConfigError, did_you_mean
from rillflow.gateway.trees.messages import REASONING, Body
from rillflow.gateway.trees.probes import ARGUMENT, PROBE_TOOL, RESULT, STAND_IN, answer, calling, result

Tools = list[Body] | None
WriteCalls = Callable[[Sequence[Body]], str]

_FIELDS = (REASONING, "reasoning", "thinking")
_THOUGHT = "qthought"
_LONG_ID = "call_0123456789abcdef_0"
_ID = 9  # characters of a shortened id
# Variables that we or Jinja pass to every template; they are not options.
_GIVEN = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "documents"}
    | {"raise_exception", "strftime_now", "loop", "namespace", "range", "dict", "lipsum", "cycler", "joiner"}
)


class ChatTemplate:
    """The chat template of a tokenizer; `source` replaces the tokenizer's own.

    `options` are variables of the template; an unknown one raises ConfigError. `write_calls` writes tool calls for a
    template that has no place for them.
    """

    def __init__(
        self,
        tokenizer: Any,
        source: str | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        own: Any = source or getattr(tokenizer, "chat_template", None)  # a tokenizer may have several, by name
        if own is None:
            raise ConfigError(
                "the tokenizer has no chat template",
                "add chat_template.jinja to the model's folder, or name a file in policies.NAME.chat_template",
            )
        sources: dict[str, str] = {"default": own} if isinstance(own, str) else dict(own)
        self.source = "\n".join(sources.values())
        self.options = dict(options or {})
        self.write_calls: WriteCalls | None = None
        self._tokenizer = tokenizer
        self._override = source
        self._now = now()
        self._templates = _compiled(sources, self._now)
        self.known_options = option_names(self.source) - set(tokenizer.special_tokens_map)
        self._refuse_unknown()
        self.least_tools: Tools = self._find_least_tools()
        self._reasoning_field = self._find_reasoning_field()
        self._silence = self._find_silence()
        self._writes_results = self._shows(RESULT, [*STAND_IN[:1], calling(""), result(RESULT)])
        self.writes_calls = bool(self.written_call)
        long = [STAND_IN[0], calling("", _LONG_ID), result(RESULT, _LONG_ID)]
        self._short_ids = self._writes_results and self.writes_calls and not self._shows(RESULT, long)

    def text(self, messages: Sequence[Body], tools: Tools, *, prompt: bool) -> str:
        """Return what the template writes for a conversation, with or without the generation prompt."""
        return self._written(self._put(messages), tools, prompt=prompt)

    def variant(self, options: Mapping[str, Any]) -> ChatTemplate:
        """Return this template with the additional options of one call. Raises BadRequest for an unknown one."""
        for name in options:
            if name not in self.known_options:
                message, hint = unknown_option(name, self.known_options)
                raise BadRequest(f"chat_template_kwargs: {message}", hint)
        made = ChatTemplate(self._tokenizer, self._override, self.options | dict(options), now=lambda: self._now)
        made.write_calls = self.write_calls
        return made

    @property
    def has_reasoning(self) -> bool:
        """True if the template has a field for the reasoning; else the reasoning is part of the text."""
        return bool(self._reasoning_field)

    @property
    def writes_tools(self) -> bool:
        """True if the template writes the offered tools into the prompt."""
        try:
            with_tools = self._written(STAND_IN[:1], [PROBE_TOOL], prompt=True)
            return PROBE_TOOL["function"]["name"] in with_tools
        except BadRequest:
            return False

    @cached_property
    def written_call(self) -> str:
        """The template's text of an answer that calls a tool, up to the tool's result; empty if it drops calls."""
        for after in ([result(RESULT)], []):
            try:
                asked = self._written(STAND_IN[:1], self.least_tools, prompt=True)
                told = [STAND_IN[0], self._quiet(calling("")), *after]
                whole = self._written(told, self.least_tools, prompt=False)
            except BadRequest:
                continue
            question = STAND_IN[0]["content"]
            begin = len(asked) if whole.startswith(asked) else whole.find(question) + len(question)
            written = whole[begin:].partition(RESULT)[0]
            if ARGUMENT in written:
                return written
        return ""

    @property
    def written_ends(self) -> list[str]:
        """`written_call`, cut at each special token after the argument: one of them ends the answer."""
        begin = self.written_call.find(ARGUMENT)
        found = {self.written_call.find(token, begin) for token in self._tokenizer.all_special_tokens}
        return [self.written_call[:at] for at in sorted(found) if at >= 0]

    # ------------------------------------------------------------ messages as the template takes them

    def _put(self, messages: Sequence[Body]) -> list[Body]:
        put: list[Body] = []
        for body in messages:
            if body["role"] == "tool" and not self._writes_results:
                said = f"<tool_response>\n{body['content']}\n</tool_response>"
                if put and put[-1].get(RESULT):
                    said = f"{put.pop()['content']}\n{said}"
                put.append({"role": "user", "content": said, RESULT: True})
            elif body["role"] == "assistant":
                put.append(self._quiet(self._with_reasoning(self._with_calls(body))))
            else:
                put.append(self._with_short_id(body))
        return put

    def _with_calls(self, body: Body) -> Body:
        calls = body.get("tool_calls")
        if not calls:
            return body
        if self.writes_calls:
            short = [call | {"id": _shortened(call["id"])} for call in calls] if self._short_ids else calls
            return body | {"tool_calls": short}
        if self.write_calls is None:
            return body
        told = f"{body['content']}\n" if body["content"] and not body["content"].endswith("\n") else body["content"]
        kept = {name: value for name, value in body.items() if name != "tool_calls"}
        return kept | {"content": told + self.write_calls(calls)}

    def _with_reasoning(self, body: Body) -> Body:
        if REASONING not in body or self._reasoning_field == REASONING:
            return body
        kept = {name: value for name, value in body.items() if name != REASONING}
        if self._reasoning_field:
            return kept | {self._reasoning_field: body[REASONING]}
        return kept | {"content": f"<think>\n{body[REASONING]}\n</think>\n\n{body['content']}"}

    def _quiet(self, body: Body) -> Body:
        """Return an answer that only calls tools with the empty content that the template expects."""
        return body | {"content": self._silence} if body.get("tool_calls") and not body["content"] else body

    def _with_short_id(self, body: Body) -> Body:
        id = body.get("tool_call_id")
        return body | {"tool_call_id": _shortened(id)} if id and self._short_ids else body

    # ------------------------------------------------------------ properties of the template

    def _find_least_tools(self) -> Tools:
        """Return the tools of a stand-in: None, unless the template fails without tools."""
        try:
            self._written(STAND_IN[:1], None, prompt=True)
        except BadRequest:
            return [PROBE_TOOL]
        return None

    def _find_reasoning_field(self) -> str:
        for field in _FIELDS:
            thinking = {field: _THOUGHT}
            shapes = ([answer("afirst") | thinking], [calling("") | thinking], [calling("") | thinking, result(RESULT)])
            if any(self._shows(_THOUGHT, [STAND_IN[0], *shape]) for shape in shapes):
                return field
        return ""

    def _find_silence(self) -> str | None:
        """Return the empty content, `""` or None, for which the template writes less."""
        lengths: dict[str | None, int] = {}
        for silence in ("", None):
            try:
                told = [STAND_IN[0], calling("") | {"content": silence}]
                lengths[silence] = len(self._written(told, self.least_tools, prompt=False))
            except BadRequest:
                continue
        return min(lengths, key=lambda silence: lengths[silence], default="")

    def _shows(self, text: str, messages: list[Body]) -> bool:
        """Return whether the template writes `text` for `messages`, with or without the generation prompt."""
        for prompt in (False, True):
            try:
                if text in self._written(messages, self.least_tools, prompt=prompt):
                    return True
            except BadRequest:
                continue
        return False

    def _written(self, messages: Sequence[Body], tools: Tools, *, prompt: bool) -> str:
        variables = {**self._tokenizer.special_tokens_map, **self.options}
        try:
            return self._template(tools).render(
                messages=list(messages), tools=tools, documents=None, add_generation_prompt=prompt, **variables
            )
        except Exception as error:  # a template is the model authors' code and may raise anything
            raise BadRequest(f"the chat template cannot write these messages: {error}") from error

    def _template(self, tools: Tools) -> jinja2.Template:
        """Return the template for a request. A tokenizer may have a separate one for requests with tools."""
        return self._templates.get("tool_use" if tools else "default") or self._templates["default"]

    def _refuse_unknown(self) -> None:
        for name in self.options:
            if name not in self.known_options:
                raise ConfigError(*unknown_option(name, self.known_options))


class _Generation(Extension):
    """`{% generation %}`, which marks answers for the training of other libraries. Its content is plain text here."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The Jinja environment of transformers, for which chat templates are written.

    Unlike there, a template may build lists: some published ones do.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


def _environment() -> _Environment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _compiled(sources: Mapping[str, str], now: datetime) -> dict[str, jinja2.Template]:
    environment = _environment()
    environment.globals["strftime_now"] = now.strftime
    try:
        compiled = {name: environment.from_string(source) for name, source in sources.items()}
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template is not valid Jinja: {error}", "fix the template") from error
    compiled.setdefault("default", next(iter(compiled.values())))
    return compiled


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def prompt_key(tools: Tools, options: Mapping[str, Any] | None = None) -> bytes:
    """Return a key of the tools and options of a prompt, as JSON; empty without any."""
    if options:
        return msgspec.json.encode({"tools": tools or [], "chat_template_kwargs": options}, order="sorted")
    return msgspec.json.encode(tools, order="sorted") if tools else b""


def option_names(source: str) -> set[str]:
    """Return the names of the template's options."""
    tree = _environment().parse(source)
    # A name that is set within a loop or a macro is not an option.
    scopes = tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro))
    own = {name.name for scope in scopes for name in scope.find_all(jinja2.nodes.Name) if name.ctx != "load"}
    return jinja2.meta.find_undeclared_variables(tree) - own - _GIVEN


def unknown_option(name: str, known: set[str]) -> tuple[str, str]:
    """Return the message and the hint of the error about an unknown option."""
    listed = ", ".join(sorted(known)) or "none"
    return f"the chat template has no option {name!r}", f"{did_you_mean(name, sorted(known))}it has: {listed}"


def _shortened(id: str) -> str:
    if len(id) == _ID and id.isalnum():
        return id
    return blake2b(id.encode(), digest_size=5).hexdigest()[:_ID]
