"""Structured answers: the requests of each dialect, the grammar that the engine gets, and refusals before that."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import llguidance.hf
import openai
import pytest
from gateway_support import DEEPSEEK_LIKE, QWEN_LIKE
from openai_support import CHAT_TOOLS, HERMES_CALL, STYLES, asking

from rillflow.engine.requests import llguidance_grammar
from rillflow.gateway import anthropic_url
from rillflow.gateway.dialects.structured import forced
from rillflow.gateway.grammars import DEEPEST, LARGEST, Calls, composed, of_schema
from rillflow.gateway.reading.json_formats import Hermes
from rillflow.types import Grammar
from tiny_policy import tiny_renderer

SCHEMA = {"type": "object", "properties": {"box": {"type": "string"}}, "required": ["box"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
SAID = '{"box": "red"}'
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "empty"}}


def grammar(asked: Any) -> Grammar:
    """Return the grammar that the engine got with the last call."""
    found = asked.served.engine.requests[-1].sampling.grammar
    assert found is not None
    return found


def accepts(asked: Any, text: str) -> bool:
    """Return whether that grammar accepts a whole answer in the tokens of the gateway's tokenizer."""
    tree = llguidance.hf.from_tokenizer(asked.served.renderer._tokenizer)
    matcher = llguidance.LLMatcher(tree, llguidance_grammar(grammar(asked)))
    assert not matcher.is_error(), matcher.get_error()
    ids = asked.served.renderer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


# ---------------------------------------------------------------- what is asked for


CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": FORMAT}, SAID, '{"box": 3}'),
    ({"response_format": {"type": "json_object"}}, '{"a": [1, {}]}', "[1]"),
    ({"guided_json": SCHEMA}, SAID, "{}"),
    ({"guided_json": json.dumps(SCHEMA)}, SAID, "{}"),
    ({"guided_regex": "[0-9]+"}, "42", "x"),
    ({"guided_choice": ["yes", "no."]}, "no.", "nob"),
    ({"guided_grammar": 'start: "a" | "b" start'}, "bba", "b"),
    ({"structured_outputs": {"json": SCHEMA}}, SAID, "{}"),
    ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ({"structured_outputs": {"regex": "a|b"}}, "a", "c"),
    ({"structured_outputs": {"choice": ["x"]}}, "x", "y"),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "b", "ab"),
]


@pytest.mark.parametrize(("asked_for", "right", "wrong"), CHAT)
async def test_what_chat_and_completions_may_ask_for(asked_for: dict[str, Any], right: str, wrong: str) -> None:
    async with asking() as asked:
        asked.script("a", "b")
        for ask in (asked.chat, lambda **send: asked.complete("hello", **send)):
            await ask(extra_body=asked_for)
            assert accepts(asked, right)
            assert not accepts(asked, wrong)


async def test_no_shape_is_no_grammar() -> None:
    async with asking() as asked:
        asked.script("a", "b")
        await asked.chat(response_format={"type": "text"}, tools=CHAT_TOOLS, tool_choice="auto")
        await asked.respond(text={"format": {"type": "text"}})
        assert [request.sampling.grammar for request in asked.served.engine.requests] == [None, None]


async def test_responses_and_messages_ask_in_their_own_words() -> None:
    import anthropic

    async with asking() as asked:
        asked.script(SAID, SAID, SAID)
        form = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
        said = await asked.respond(text={"format": form})
        assert said.text.format.type == "json_schema"
        assert accepts(asked, SAID)
        client = anthropic.AsyncAnthropic(
            base_url=anthropic_url(asked.served.url, "s1"), api_key=asked.served.key, max_retries=0
        )
        body: Any = {"model": "policy", "max_tokens": 40, "messages": [{"role": "user", "content": "hello"}]}
        shape = {"type": "json_schema", "schema": SCHEMA}
        for extra in ({"output_config": {"format": shape}}, {"output_format": shape}):
            await client.messages.create(**body, extra_body=extra)
            assert accepts(asked, SAID)
            assert not accepts(asked, "hello")
        await client.close()


async def test_json_is_spaced_as_python_writes_it_and_has_no_other_properties() -> None:
    async with asking() as asked:
        asked.script(SAID, SAID, SAID)
        await asked.chat(response_format=FORMAT)
        for wrong in ('{"box":"red"}', '{ "box": "red"}', '{"box": "red"}\n', '{"box": "red", "more": 1}'):
            assert not accepts(asked, wrong)
        free = {**SCHEMA, "additionalProperties": True}
        await asked.chat(response_format={"type": "json_schema", "json_schema": {"schema": free}})
        assert accepts(asked, '{"box": "red", "more": 1}')
        whole = {"allOf": [SCHEMA, {"type": "object", "properties": {"more": {"type": "integer"}}}]}
        await asked.chat(response_format={"type": "json_schema", "json_schema": {"schema": whole}})
        assert accepts(asked, '{"box": "red", "more": 1}')


# ---------------------------------------------------------------- calls that must be made


@pytest.mark.parametrize("style", ["hermes", "llama3", "json"])
async def test_a_forced_call_is_written_in_the_models_style(style: str) -> None:
    call = STYLES[style].replace("```json\n[", "").replace("]\n```", "")
    async with asking(tools=style) as asked:
        asked.script(call, call)
        for choice in ("required", {"type": "function", "function": {"name": "count"}}):
            said = (await asked.chat(tools=[TOOL, OTHER], tool_choice=choice)).choices[0]
            assert said.finish_reason == "tool_calls"
            assert said.message.tool_calls[0].function.arguments == SAID
            assert accepts(asked, call)
            assert not accepts(asked, "I would rather not.")
            assert not accepts(asked, call.replace('"box"', '"lid"'))
            assert accepts(asked, call.replace("count", "empty")) == (choice == "required")


async def test_a_shape_beside_tools_is_a_call_or_the_shape() -> None:
    async with asking() as asked:
        asked.script(HERMES_CALL, SAID, HERMES_CALL, SAID)
        await asked.chat(tools=[TOOL], response_format=FORMAT)
        assert accepts(asked, HERMES_CALL)
        assert accepts(asked, SAID)
        assert not accepts(asked, "red")
        await asked.chat(tools=[TOOL], tool_choice="none", response_format=FORMAT)
        assert not accepts(asked, HERMES_CALL)
        await asked.chat(tools=[TOOL], tool_choice="required", response_format=FORMAT)
        assert not accepts(asked, SAID), "a call that must be made comes first"
        assert accepts(asked, HERMES_CALL)


async def test_the_other_dialects_force_calls_too() -> None:
    import anthropic

    async with asking() as asked:
        asked.script(HERMES_CALL, HERMES_CALL, HERMES_CALL)
        tool: Any = {"type": "function", "name": "count", "parameters": SCHEMA}
        said = await asked.respond(tools=[tool], tool_choice={"type": "function", "name": "count"})
        assert said.output[0].name == "count"
        assert accepts(asked, HERMES_CALL)
        client = anthropic.AsyncAnthropic(
            base_url=anthropic_url(asked.served.url, "s1"), api_key=asked.served.key, max_retries=0
        )
        body: Any = {"model": "policy", "max_tokens": 40, "messages": [{"role": "user", "content": "hello"}]}
        tools: Any = [{"name": "count", "input_schema": SCHEMA}]
        for choice in ({"type": "any"}, {"type": "tool", "name": "count"}):
            made: Any = await client.messages.create(**body, tools=tools, tool_choice=choice)
            assert made.stop_reason == "tool_use"
            assert accepts(asked, HERMES_CALL)
        with pytest.raises(anthropic.BadRequestError, match="tool 'other' is not among"):
            await client.messages.create(**body, tools=tools, tool_choice={"type": "tool", "name": "other"})
        await client.close()


@pytest.mark.parametrize(
    ("template", "before"), [(QWEN_LIKE, "<think>\nhm, {\n</think>\n\n"), (DEEPSEEK_LIKE, "hm</think>")]
)
async def test_a_shape_comes_behind_the_reasoning(template: str, before: str) -> None:
    async with asking(template, reasoning="think") as asked:
        asked.script(before + SAID)
        said = (await asked.chat(response_format=FORMAT)).choices[0].message
        assert said.content == SAID
        assert accepts(asked, before + SAID)
        assert not accepts(asked, before + "hello")
        assert accepts(asked, SAID) == (template == QWEN_LIKE)


def test_markers_that_are_tokens_may_be_written_as_such() -> None:
    """A marker that no text can become is named by its id."""
    renderer = tiny_renderer()
    made = composed(None, Calls([TOOL], Hermes(), forced=True), None, renderer)
    assert made is not None
    ids = [renderer.encode(marker) for marker in ("<tool_call>", "</tool_call>")]
    assert [len(one) for one in ids] == [1, 1]
    assert f'(<[{ids[0][0]}]>|"<tool_call>")' in made.text


async def test_tools_that_are_no_functions_are_neither_offered_nor_in_the_grammar() -> None:
    custom = {"type": "custom", "custom": {"name": "write"}}
    async with asking() as asked:
        asked.script(HERMES_CALL)
        said = (await asked.chat(tools=[custom, TOOL], tool_choice="required")).choices[0].message
        assert said.tool_calls[0].function.name == "count"
        assert accepts(asked, HERMES_CALL)
        assert not accepts(asked, HERMES_CALL.replace("count", "write"))
        assert "write" not in asked.prompts[0]
        with pytest.raises(openai.BadRequestError, match="if the request has tools"):
            await asked.chat(tools=[custom], tool_choice="required")


async def test_a_tool_without_function_and_type_is_refused() -> None:
    async with asking() as asked:
        for tool, param in (
            ({}, "tools[0]"),
            ({"name": "f"}, "tools[0]"),
            ({"type": "function"}, "tools[0].function"),
            ({"type": "function", "function": {"name": ["f"]}}, "tools[0].function.name"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await asked.chat(tools=[tool])
            assert caught.value.param == param
        with pytest.raises(openai.BadRequestError) as caught:
            await asked.respond(tools=[{}])
        assert caught.value.param == "tools[0]"


def only(*names: str, mode: str = "auto") -> dict[str, Any]:
    """The choice of allowed tools, as chat completions write it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("style", sorted(STYLES))
async def test_a_call_of_a_tool_that_is_not_allowed_stays_text(style: str) -> None:
    other = STYLES[style].replace("count", "empty")
    async with asking(tools=style) as asked:
        asked.script(other, STYLES[style], other, other)
        tools = [TOOL, OTHER]
        said = (await asked.chat(tools=tools, tool_choice=only("count"))).choices[0]
        assert (said.message.content, said.message.tool_calls, said.finish_reason) == (other, None, "stop")
        assert (await asked.chat(tools=tools, tool_choice=only("count"))).choices[0].message.tool_calls
        named = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "count"}]}
        flat: Any = [{"type": "function", **tool["function"]} for tool in tools]
        assert (await asked.respond(tools=flat, tool_choice=named)).output_text == other
        assert (await asked.chat(tools=tools, tool_choice="auto")).choices[0].message.tool_calls
        assert len({tuple(request.tokens) for request in asked.served.engine.requests}) == 1, "all stay in the prompt"


async def test_one_of_the_allowed_tools_can_be_required() -> None:
    async with asking() as asked:
        asked.script(HERMES_CALL, HERMES_CALL, HERMES_CALL)
        tools = [OTHER, TOOL]
        await asked.chat(tools=tools, tool_choice=only("count", mode="required"))
        assert accepts(asked, HERMES_CALL)
        assert not accepts(asked, HERMES_CALL.replace("count", "empty").replace('{"box": "red"}', "{}"))
        assert not accepts(asked, "I would rather not.")
        named = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "count"}]}
        await asked.respond(tools=[{"type": "function", **tool["function"]} for tool in tools], tool_choice=named)
        assert accepts(asked, HERMES_CALL)
        assert not accepts(asked, "I would rather not.")
        await asked.chat(tools=tools, tool_choice=only(), response_format=FORMAT)
        assert accepts(asked, SAID)
        assert not accepts(asked, HERMES_CALL)


# Every one has a keyword that no grammar can hold, and an answer that shows what is kept beside it.
UNKEPT: list[tuple[str, dict[str, Any], str]] = [
    ("path", {"type": "string", "format": "path"}, '"a/b"'),
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}, '{"b": 1}'),
    ("look-around", {"type": "string", "pattern": "^(?!x)a"}, '"x"'),
    ("look-around", {"type": "object", "patternProperties": {"(?=a)b": {"type": "integer"}}}, '{"c": "d"}'),
    ("example.org", {"$ref": "https://example.org/schema"}, '["x"]'),
    ("oneOf", {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]}, '"abc"'),
    ("not", {"type": "string", "not": {"const": "x"}}, '"x"'),
]


def with_box(box: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """A tool whose one argument has the schema `box`."""
    parameters = {"type": "object", "properties": {"box": {"$ref": "#/$defs/box"}}, "required": ["box"]}
    function = {"name": "count", "parameters": {**parameters, "$defs": {"box": box}}, "strict": strict}
    return {"type": "function", "function": function}


@pytest.mark.parametrize(("why", "box", "value"), UNKEPT)
async def test_keywords_that_no_grammar_can_hold_are_left_out_unless_a_tool_is_strict(
    why: str, box: dict[str, Any], value: str
) -> None:
    call = HERMES_CALL.replace('"red"', value)
    async with asking() as asked:
        for more in ({"tool_choice": "required"}, {"response_format": FORMAT}):
            asked.script(call)
            await asked.chat(tools=[with_box(box, strict=False)], **more)
            assert accepts(asked, call)
            assert not accepts(asked, call.replace('"box"', '"lid"'))
            with pytest.raises(openai.BadRequestError, match=why) as refused:
                await asked.chat(tools=[with_box(box, strict=True)], **more)
            assert refused.value.param == "tools[0].function.parameters"
        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": box, "strict": True}}
        with pytest.raises(openai.BadRequestError, match=why):
            await asked.chat(response_format=shape)


# ---------------------------------------------------------------- what is refused


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def with_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


WHERE = "response_format.json_schema.schema"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (with_schema(nested(DEEPEST + 1)), WHERE, "deep"),
    (with_schema({"enum": ["x" * LARGEST]}), WHERE, "bytes"),
    (with_schema({"type": "array", "uniqueItems": True}), WHERE, "uniqueItems"),
    (with_schema({"type": "string", "pattern": "(?=a)b"}), WHERE, "look-around"),
    (with_schema({"$ref": "https://example.org/schema"}), WHERE, "example.org"),
    (with_schema("string"), WHERE, "object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, WHERE, "needs a schema"),
    ({"response_format": {"type": "json_schema"}}, WHERE, "needs a schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "structural_tag"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
    ({"guided_choice": []}, "", ""),
    ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "list"),
    ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex", "string"),
    ({"guided_regex": "a", "response_format": FORMAT}, "response_format", "one shape"),
    ({"tool_choice": "required"}, "tool_choice", "if the request has tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not among"),
    ({"tools": [TOOL], "tool_choice": only("x")}, "tool_choice", "not among the tools"),
    ({"tools": [TOOL], "tool_choice": only(mode="required")}, "tool_choice", "if the request has tools"),
    ({"tools": [TOOL], "tool_choice": only("count", mode="none")}, "tool_choice", "a mode"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": "count"}}, "tool_choice", "a mode"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}, "strict": True}}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters",
        "not",
    ),
]


async def test_what_cannot_be_kept_is_refused_before_anything_is_sampled() -> None:
    async with asking() as asked:
        for change, param, why in REFUSED:
            if not why:  # asks for nothing
                asked.script("a")
                await asked.chat(extra_body=change)
                asked.served.engine.requests.clear()
                continue
            with pytest.raises(openai.BadRequestError, match=re.escape(why)) as caught:
                await asked.chat(extra_body=change)
            assert caught.value.param == param, change
        assert not asked.served.engine.requests


def test_tools_of_the_provider_force_nothing() -> None:
    assert forced({"type": "web_search"}, [TOOL]) == ()
    assert forced("auto", [TOOL]) == forced("none", [TOOL]) == forced(None, None) == ()


def test_a_schema_at_the_bounds_is_taken() -> None:
    assert of_schema(nested(DEEPEST - 2), "schema").kind == "json"
