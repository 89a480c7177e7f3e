"""Tool-call parsing in every style, however the stream is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.gateway.reading import TOOL_FORMATS
from rillflow.gateway.reading.incremental import JsonScan, Quotes
from rillflow.gateway.reading.tools import Offered, ParsedCall, Part
from rillflow.gateway.trees.messages import ToolCall, message
from soak import repetitions

CALL = '<tool_call>{"name": "count", "arguments": {"box": "red"}}</tool_call>'
BARE = '{"name": "count", "parameters": {"box": "red"}}'
TAG = "<|python_tag|>"
COUNT = ParsedCall("count", '{"box": "red"}')
TRICKY = '{"name": "f", "arguments": {"a": "}] \\"</tool_call> {[; \\\\"}}'
TRICKY_CALL = ParsedCall("f", '{"a": "}] \\"</tool_call> {[; \\\\"}')


def joined(parts: list[Part]) -> list[Part]:
    """Neighbouring texts as one: how they were cut is the stream's business."""
    result: list[Part] = []
    for part in parts:
        if result and isinstance(part, str) and isinstance(result[-1], str):
            result[-1] += part
        else:
            result.append(part)
    return result


def parse(style: str, *texts: str) -> list[Part]:
    parser = TOOL_FORMATS[style]().parser(Offered())
    return joined([part for text in texts for part in parser.feed(text)] + parser.finish())


def check(style: str, text: str, parts: list[Part]) -> None:
    assert parse(style, text) == parts
    assert parse(style, *text) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("just text", ["just text"]),
        ("", []),
        (CALL, [COUNT]),
        (f"I look.\n{CALL}", ["I look.\n", COUNT]),
        (f"{CALL}\n{CALL}", [COUNT, COUNT]),
        (f"{CALL}\n \n", [COUNT]),
        (f"{CALL}\ndone", [COUNT, "\ndone"]),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', [ParsedCall("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ParsedCall("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"é": "日"}}</tool_call>', [ParsedCall("f", '{"é": "日"}')]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [ParsedCall("f", '{"a": 1}')]),
        (f"<tool_call>oops {CALL}", ["<tool_call>oops ", COUNT]),
        ("a < b <tool", ["a < b <tool"]),
        (f"<tool_call>{TRICKY}</tool_call>", [TRICKY_CALL]),
        (f'<tool_call>{{"a": "open}}</tool_call> {CALL}', ['<tool_call>{"a": "open}</tool_call> ', COUNT]),
        (f'<tool_call>{{"a": "open\n}}</tool_call>{CALL}', ['<tool_call>{"a": "open\n}</tool_call>', COUNT]),
    ],
)
def test_hermes(text: str, parts: list[Part]) -> None:
    check("hermes", text, parts)


@pytest.mark.parametrize(
    "body",
    [
        "{bad json}",
        "[]",
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "nope"}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}",  # deeper than any Python reads
    ],
)
def test_what_cannot_be_parsed_stays_text(body: str) -> None:
    for style, text in (
        ("hermes", f"so: <tool_call>{body}</tool_call> end"),
        ("llama3", f"so: {TAG}{body} end"),
        ("json", body),
        ("json", f"```json\n{body}\n```"),
    ):
        assert parse(style, text) == [text]


def test_an_open_call_stays_text() -> None:
    for style, text in (
        ("hermes", 'x<tool_call>{"name": "f"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}'),
        ("llama3", '{"name": "f", "parameters": {'),
        ("llama3", f"{TAG} "),
        ("json", '[{"name": "f", "arguments": {}}'),
        ("json", "```json\n"),
    ):
        check(style, text, [text])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("just text; {a} or [b]", ["just text; {a} or [b]"]),
        (BARE, [COUNT]),
        (f"\n {BARE}\n", [COUNT]),
        (f"{TAG}{BARE}", [COUNT]),
        (f"{TAG} {BARE} ", [COUNT]),
        (f"I look.\n{TAG}{BARE}", ["I look.\n", COUNT]),
        (f"{BARE};{BARE}", [COUNT, COUNT]),
        (f"{TAG}{BARE}; {BARE} ;", [COUNT, COUNT]),
        (f"{TAG}{BARE};{TAG}{BARE}", [COUNT, COUNT]),
        (f"{BARE} done", [COUNT, " done"]),
        (f"{BARE} {BARE}", [COUNT, f" {BARE}"]),
        (f"{BARE}; done", [COUNT, "; done"]),
        (f"{TAG}search(1)", [f"{TAG}search(1)"]),
        (f"{TAG}no {TAG}{BARE}", [f"{TAG}no ", COUNT]),
        (f'{TAG}{{"name": "f"}}', [ParsedCall("f", "{}")]),
        ('{"name": "Bob", "age": 3}', ['{"name": "Bob", "age": 3}']),
        (f"text {BARE}", [f"text {BARE}"]),
        (TRICKY, [TRICKY_CALL]),
        ('{"a": "open\n} more', ['{"a": "open\n} more']),
        (" \n", [" \n"]),
    ],
)
def test_llama3(text: str, parts: list[Part]) -> None:
    check("llama3", text, parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("just text", ["just text"]),
        (BARE, [COUNT]),
        (f" [{BARE}, {BARE}]\n", [COUNT, COUNT]),
        (f"```json\n{BARE}\n```", [COUNT]),
        (f"```\n[{BARE}]\n```\n", [COUNT]),
        (f"```json{BARE}", [COUNT]),
        (f"{BARE} and more", [f"{BARE} and more"]),
        (f"Here: {BARE}", [f"Here: {BARE}"]),
        (f"```python\n{BARE}\n```", [f"```python\n{BARE}\n```"]),
        (f"{BARE}```", [f"{BARE}```"]),
        (f'[{BARE}, {{"a": 1}}]', [f'[{BARE}, {{"a": 1}}]']),
        ("[]", ["[]"]),
        ("[1] is a reference", ["[1] is a reference"]),
        ('{"name": "Bob", "age": 3}', ['{"name": "Bob", "age": 3}']),
        (TRICKY, [TRICKY_CALL]),
        ("``", ["``"]),
        (" ", [" "]),
    ],
)
def test_plain_json(text: str, parts: list[Part]) -> None:
    check("json", text, parts)


def test_text_that_cannot_become_a_call_is_not_held_back() -> None:
    for style, texts in (
        ("hermes", ("a {", "b <x")),
        ("llama3", ("a {", "b <x")),
        ("json", ("[1", "] {")),
        ("json", (BARE + " b", "c")),
    ):
        parser = TOOL_FORMATS[style]().parser(Offered())
        assert "".join(str(part) for text in texts for part in parser.feed(text)) == "".join(texts)


PIECES = [
    CALL,
    BARE,
    TAG,
    "<tool_call>",
    "</tool_call>",
    ";",
    "\n",
    "text",
    "<",
    "{}",
    '"',
    "\\",
    "[",
    "]",
    "```json",
    "```",
]


@settings(max_examples=repetitions(100, 300), deadline=None)
@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.lists(st.sampled_from([*PIECES, TRICKY, '{"name": "f", "arguments": {"a": "']), max_size=8),
    st.lists(st.integers(0, 300), max_size=12),
)
def test_the_cuts_of_a_stream_change_nothing(style: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert parse(style, *(text[a:b] for a, b in pairwise(places))) == parse(style, text)
    assert parse(style, *text) == parse(style, text)


@pytest.mark.parametrize("style", ["hermes", "llama3", "json"])
def test_the_cost_is_linear_in_the_text(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every character of a long call is scanned once, though it comes in small pieces."""
    scanned = 0
    feed, follow = JsonScan.feed, Quotes.feed

    def counting(self: JsonScan, text: str) -> int:
        nonlocal scanned
        scanned += len(text)
        return feed(self, text)

    def counting_quotes(self: Quotes, text: str) -> None:
        nonlocal scanned
        scanned += len(text)
        follow(self, text)

    monkeypatch.setattr(JsonScan, "feed", counting)
    monkeypatch.setattr(Quotes, "feed", counting_quotes)
    body = '{"name": "f", "arguments": {"a": "' + "</tool_call> {x} " * 500 + '"}}'
    text = f"<tool_call>{body}</tool_call>" if style == "hermes" else body
    parts = parse(style, *(text[at : at + 3] for at in range(0, len(text), 3)))
    assert [part.name for part in parts if isinstance(part, ParsedCall)] == ["f"]
    assert scanned <= len(text)


def test_message_keys() -> None:
    def said(id: str, arguments: str) -> bytes:
        return message("assistant", "", [ToolCall(id, "f", arguments)]).key

    assert said("a", '{"x": 1, "y": [2]}') == said("b", '{"y":[2.0],"x":1.0}')
    assert said("a", '{"x": 1}') != said("a", '{"x": 2}')
    assert said("a", "not json") != said("a", "{}")
    assert message("user", "x").key != message("system", "x").key
    assert message("assistant", "x").key != said("a", "{}")
