"""Ids to text, stop strings, reasoning and calls: the same parts however they come."""

from __future__ import annotations

from itertools import pairwise

import pytest
from gateway_support import make_renderer
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.gateway.reading import TOOL_FORMATS, Read, Reader, reasoning_format
from rillflow.gateway.reading.incremental import Detokeniser, StopStrings
from rillflow.gateway.reading.reasoning import Think, Thought
from rillflow.gateway.reading.tools import Offered, ParsedCall
from soak import repetitions

RENDERER = make_renderer()
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def joined(parts: list[Read]) -> list[Read]:
    result: list[Read] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, str) and isinstance(last, str):
            result[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            result[-1] = Thought(last.text + part.text)
        else:
            result.append(part)
    return result


# ---------------------------------------------------------------- reasoning


def split(inside: bool, *texts: str) -> list[Read]:
    splitter = Think().splitter(inside=inside)
    parts: list[Read] = []
    for text in texts:
        parts += splitter.feed(text)
    return joined(parts + list(splitter.finish()))


@pytest.mark.parametrize(
    ("inside", "text", "parts"),
    [
        (False, "plain", ["plain"]),
        (False, " \nplain ", [" \nplain "]),
        (False, "<think>hm</think>yes", [Thought("hm"), "yes"]),
        (False, "\n<think>\nhm\nso\n</think>\n\nyes\n", [Thought("hm\nso"), "yes\n"]),
        (False, "<think>\n\n</think>\n\nyes", ["yes"]),
        (False, "<think>never closed \n", [Thought("never closed")]),
        (False, "a <think>b</think> c", ["a ", Thought("b"), "c"]),
        (False, "<think>a</think>b<think>c</think>d", [Thought("a"), "b", Thought("c"), "d"]),
        (False, "x </think> y", ["x </think> y"]),
        (False, "a <thin", ["a <thin"]),
        (True, "hm</think>yes", [Thought("hm"), "yes"]),
        (True, "\nhm < \n</think>\n", [Thought("hm <")]),
        (True, "hm </think", [Thought("hm </think")]),
        (True, "", []),
    ],
)
def test_reasoning(inside: bool, text: str, parts: list[Read]) -> None:
    assert split(inside, text) == parts
    assert split(inside, *text) == parts


def test_when_a_model_reasons() -> None:
    assert isinstance(reasoning_format("auto", "… '</think>' …"), Think)
    assert reasoning_format("auto", "plain") is None
    assert isinstance(reasoning_format("think", "plain"), Think)
    assert reasoning_format("none", "</think>") is None
    assert Think().opened_by("<|im_start|>assistant\n<think>\n")
    assert not Think().opened_by("<think>\n\n</think>\n\n")


# ---------------------------------------------------------------- stop strings


def cut(stops: tuple[str, ...], *parts: str) -> tuple[str, str]:
    strings = StopStrings(stops)
    text = "".join(strings.feed(part) for part in parts)
    return text + strings.finish(), strings.hit


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("END",), "one END two", ("one ", "END")),
        (("END",), "one EN", ("one EN", "")),
        (("abc", "b"), "xabc", ("xa", "b")),
        (("\n\n", "b"), "x\n\ny", ("x", "\n\n")),
        (("c", "abc"), "xabc", ("x", "abc")),
    ],
)
def test_stop_strings(stops: tuple[str, ...], text: str, expected: tuple[str, str]) -> None:
    assert cut(stops, text) == expected
    assert cut(stops, *text) == expected


# ---------------------------------------------------------------- ids to text


def test_no_half_characters() -> None:
    text = "né 日本 🙂!"
    detokeniser = Detokeniser(RENDERER.decode, ())
    pieces = [detokeniser.feed([id]) for id in RENDERER.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokeniser.finish() == text


@settings(max_examples=repetitions(60, 200), deadline=None)
@given(st.lists(st.integers(0, 262), max_size=90), st.integers(1, 40))
def test_text_of_any_ids_is_the_same_in_steps(ids: list[int], step: int) -> None:
    detokeniser = Detokeniser(RENDERER.decode, [265])
    text = "".join(detokeniser.feed(ids[at : at + step]) for at in range(0, len(ids), step))
    assert text + detokeniser.finish() == RENDERER.decode(ids) == Detokeniser(RENDERER.decode, [265]).whole(ids)


def test_the_stop_token_leaves_no_text() -> None:
    end = RENDERER.end_token
    assert end is not None
    detokeniser = Detokeniser(RENDERER.decode, [end])
    assert detokeniser.feed([*RENDERER.encode("yes"), end]) + detokeniser.finish() == "yes"


def test_garbage_is_decoded_in_linear_time() -> None:
    decoded = 0

    def decode(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return RENDERER.decode(ids)

    half = RENDERER.encode("é")[0]
    detokeniser = Detokeniser(decode, ())
    text = "".join(detokeniser.feed([half]) for _ in range(4000)) + detokeniser.finish()
    assert text == RENDERER.decode([half] * 4000)
    assert decoded < 5 * 4000


# ---------------------------------------------------------------- all together


def read(text: str, steps: list[int], *, stops: tuple[str, ...], inside: bool | None, style: str | None) -> list[Read]:
    reader = Reader(
        Detokeniser(RENDERER.decode, ()),
        StopStrings(stops) if stops else None,
        None if inside is None else Think().splitter(inside=inside),
        None if style is None else TOOL_FORMATS[style]().parser(Offered()),
    )
    ids = RENDERER.encode(text)
    if not steps:
        return joined(reader.whole(ids))
    parts: list[Read] = []
    for start, end in pairwise(sorted({0, len(ids), *(step for step in steps if step < len(ids))})):
        parts += reader.feed(ids[start:end])
    return joined(parts + reader.finish())


def test_an_answer_with_everything() -> None:
    text = f"<think>\nI count 🙂 {CALL}\n</think>\n\nI look.\n{CALL}\nEND more"
    parts = read(text, [], stops=("END",), inside=False, style="hermes")
    assert parts == [Thought(f"I count 🙂 {CALL}"), "I look.\n", ParsedCall("f", "{}")]


@settings(max_examples=repetitions(100, 300), deadline=None)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", CALL, "é🙂", " ", "\n", "text", "EN", "END", "{", '"']), max_size=8
    ),
    st.lists(st.integers(0, 150), max_size=12),
    st.sampled_from([(), ("END",), ("END", "text")]),
    st.sampled_from([None, False, True]),
    st.sampled_from([None, *TOOL_FORMATS]),
)
def test_the_parts_do_not_depend_on_the_cuts(
    texts: list[str], steps: list[int], stops: tuple[str, ...], inside: bool | None, style: str | None
) -> None:
    text = "".join(texts)
    whole = read(text, [], stops=stops, inside=inside, style=style)
    assert read(text, steps, stops=stops, inside=inside, style=style) == whole
    assert read(text, list(range(1000)), stops=stops, inside=inside, style=style) == whole
