"""Rows become tokens: exactly the tokens that a policy would have sampled are trained."""

from __future__ import annotations

from typing import Any

import pytest
from lessons import writer

from rillflow.errors import DataError
from rillflow.examples import stockroom
from rillflow.gateway.trees.messages import Message, ToolCall, message
from rillflow.trainer.supervised.texts import Writer, Written
from rillflow.weights.models import load_tokenizer
from tiny_policy import tiny_renderer, tiny_tokenizer

TOOLS: Any = stockroom.TOOLS
CALL = message("assistant", "", [ToolCall("c", "count", '{"box": "red", "item": "cups"}')])
PLAY = [message("user", "How many cups?"), CALL, message("tool", "17", call_id="c"), message("assistant", "17")]
# Qwen3's habit: reasoning of earlier answers is not written any more once a question follows.
FORGETFUL = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' ~ m.role ~ '\\n' -}}
{%- if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content is defined -%}
{{- '<think>' ~ m.reasoning_content ~ '</think>' -}}
{%- endif -%}
{{- m.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def text(row: Written, *, marked: bool = False) -> str:
    tokens = [row.tokens[place] for place in row.marked] if marked else row.tokens
    return str(tiny_tokenizer().decode(tokens))


def test_only_the_assistants_words_and_their_ends_are_trained() -> None:
    (row,) = writer().conversation(PLAY, TOOLS, last=False, where="row 0")
    called = '<tool_call>{"name": "count", "arguments": {"box": "red", "item": "cups"}}</tool_call><|im_end|>'
    assert text(row, marked=True) == f"{called}17<|im_end|>"


def test_a_conversation_has_the_tokens_of_its_text() -> None:
    renderer = tiny_renderer()
    (row,) = writer().conversation(PLAY, TOOLS, last=False, where="row 0")
    whole = renderer.text(PLAY, TOOLS, prompt=False)
    assert row.tokens == renderer.encode(whole.removesuffix("\n"))


def test_the_context_of_an_answer_is_the_prompt_that_the_gateway_writes() -> None:
    renderer = tiny_renderer()
    (row,) = writer().conversation(PLAY, TOOLS, last=True, where="row 0")
    assert row.tokens[: row.marked[0]] == list(renderer.first(PLAY[:3], TOOLS, b"").tokens)
    assert text(row, marked=True) == "17<|im_end|>"


def test_a_conversation_that_the_template_rewrites_becomes_several_rows() -> None:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = FORGETFUL
    talk = [
        message("user", "a"),
        message("assistant", "b", reasoning="because"),
        message("user", "c"),
        message("assistant", "d", reasoning="why"),
    ]
    first, second = Writer(tokenizer).conversation(talk, None, last=False, where="row 0")
    assert text(first, marked=True) == "<think>because</think>b<|im_end|>"
    assert text(second, marked=True) == "<think>why</think>d<|im_end|>"
    assert "because" not in text(second)


def test_a_conversation_without_an_answer_names_its_row() -> None:
    with pytest.raises(DataError, match=r"train.jsonl: row 3: no message is the assistant's"):
        writer().conversation(PLAY[:1], TOOLS, last=False, where="train.jsonl: row 3")


def test_texts_are_encoded_apart_and_end() -> None:
    tokenizer = tiny_tokenizer()
    row = writer().completion("How many", " cups")
    assert row.tokens == [*tokenizer.encode("How many"), *tokenizer.encode(" cups"), tokenizer.eos_token_id]
    assert row.marked == list(range(len(tokenizer.encode("How many")), len(row.tokens)))


def test_an_end_that_is_there_is_not_written_twice() -> None:
    row = writer().completion("How many", " cups<|im_end|>")
    assert text(row) == "How many cups<|im_end|>"


@pytest.mark.parametrize("answer", ["17", [message("assistant", "17")]])
def test_an_answer_is_scored_where_its_text_ends(answer: str | list[Message]) -> None:
    row = writer().scored(PLAY[:3], answer, TOOLS, "row 0")
    assert row.marked == [len(row.tokens) - 1]
    assert text(row) == tiny_renderer().text(PLAY, TOOLS, prompt=False)


def test_steps_are_scored_at_their_last_tokens() -> None:
    row = writer().steps("2 + 2 * 3", ["2 * 3 = 6", "2 + 6 = 8"], None, "\n", "row 0")
    assert text(row) == "2 + 2 * 32 * 3 = 6\n2 + 6 = 8\n"
    assert [text(Written(row.tokens[: place + 1])) for place in row.marked] == ["2 + 2 * 32 * 3 = 6\n", text(row)]


def test_steps_of_messages_are_written_by_the_template() -> None:
    row = writer().steps(PLAY[:1], [PLAY[1:3], PLAY[3:]], TOOLS, "\n", "row 0")
    assert row.tokens == writer().scored(PLAY[:3], "17", TOOLS, "row 0").tokens
    assert text(Written(row.tokens[: row.marked[0] + 1])).endswith("</tool_response><|im_end|>\n")


def test_text_and_messages_do_not_mix() -> None:
    with pytest.raises(DataError, match="row 7: it mixes text"):
        writer().steps(PLAY[:1], ["text", PLAY[1:]], TOOLS, "\n", "row 7")


def test_an_empty_step_is_refused() -> None:
    with pytest.raises(DataError, match="step 1 is empty"):
        writer().steps("question", ["one", ""], None, "", "row 0")
