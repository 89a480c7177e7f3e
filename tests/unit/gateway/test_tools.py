"""Tool-call parsing, stop strings and incremental detokenisation, however the stream is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from gateway_support import make_renderer
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.gateway.detokenise import Detokeniser
from rillflow.gateway.messages import ToolCall, message
from rillflow.gateway.tools import ParsedCall, Piece, StopStrings, ToolParser

CALL = '<tool_call>{"name": "count", "arguments": {"box": "red"}}</tool_call>'
COUNT = ParsedCall("count", '{"box": "red"}')
RENDERER = make_renderer()


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring texts as one: how they were cut is the stream's business."""
    result: list[Piece] = []
    for piece in pieces:
        if result and isinstance(piece, str) and isinstance(result[-1], str):
            result[-1] += piece
        else:
            result.append(piece)
    return result


def parse(*parts: str) -> list[Piece]:
    parser = ToolParser()
    return joined([piece for part in parts for piece in parser.feed(part)] + parser.finish())


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("just text", ["just text"]),
        (CALL, [COUNT]),
        (f"I look.\n{CALL}", ["I look.\n", COUNT]),
        (f"{CALL}\n{CALL}", [COUNT, COUNT]),
        (f"{CALL}\n \n", [COUNT]),
        (f"{CALL}\ndone", [COUNT, "\ndone"]),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', [ParsedCall("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ParsedCall("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"é": "日"}}</tool_call>', [ParsedCall("f", '{"é": "日"}')]),
        (f"<tool_call>oops {CALL}", ["<tool_call>oops ", COUNT]),
        ("a < b <tool", ["a < b <tool"]),
    ],
)
def test_calls_and_text(text: str, pieces: list[Piece]) -> None:
    assert parse(text) == pieces
    assert parse(*text) == pieces


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
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}",
    ],
)
def test_what_cannot_be_parsed_stays_text(body: str) -> None:
    text = f"so: <tool_call>{body}</tool_call> end"
    assert parse(text) == [text]


def test_an_open_call_stays_text() -> None:
    assert parse('x<tool_call>{"name": "f"') == ['x<tool_call>{"name": "f"']


@given(
    st.lists(st.sampled_from([CALL, "<tool_call>", "</tool_call>", "\n", "text", "<", "{}"]), max_size=8),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_the_cuts_of_a_stream_change_nothing(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert parse(*(text[a:b] for a, b in pairwise(places))) == parse(text)


def cut(stops: tuple[str, ...], *parts: str) -> tuple[str, bool]:
    strings = StopStrings(stops)
    text = ""
    for part in parts:
        text += strings.feed(part)
        if strings.hit:
            return text, True
    return text + strings.finish(), False


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("END",), "one END two", ("one ", True)),
        (("END",), "one EN", ("one EN", False)),
        (("abc", "b"), "xabc", ("xa", True)),
        (("\n\n", "b"), "x\n\ny", ("x", True)),
    ],
)
def test_stop_strings(stops: tuple[str, ...], text: str, expected: tuple[str, bool]) -> None:
    assert cut(stops, text) == expected
    assert cut(stops, *text) == expected


def test_no_half_characters() -> None:
    text = "né 日本 🙂!"
    detokeniser = Detokeniser(RENDERER.decode, frozenset())
    pieces = [detokeniser.feed([id]) for id in RENDERER.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokeniser.finish() == text


@settings(max_examples=200)
@given(st.lists(st.integers(0, 262), max_size=24), st.integers(1, 5))
def test_text_of_any_ids_is_the_same_in_steps(ids: list[int], step: int) -> None:
    hidden = frozenset([265])
    detokeniser = Detokeniser(RENDERER.decode, hidden)
    text = "".join(detokeniser.feed(ids[at : at + step]) for at in range(0, len(ids), step))
    assert text + detokeniser.finish() == RENDERER.decode(ids)


def test_the_stop_token_leaves_no_text() -> None:
    end = RENDERER.end_token
    assert end is not None
    detokeniser = Detokeniser(RENDERER.decode, frozenset([end]))
    assert detokeniser.feed([*RENDERER.encode("yes"), end]) + detokeniser.finish() == "yes"


def test_message_keys() -> None:
    def said(id: str, arguments: str) -> bytes:
        return message("assistant", "", [ToolCall(id, "f", arguments)]).key

    assert said("a", '{"x": 1, "y": [2]}') == said("b", '{"y":[2.0],"x":1.0}')
    assert said("a", '{"x": 1}') != said("a", '{"x": 2}')
    assert said("a", "not json") != said("a", "{}")
    assert message("user", "x").key != message("system", "x").key
    assert message("assistant", "x").key != said("a", "{}")
