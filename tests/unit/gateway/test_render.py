"""Rendering: extensions are what the template writes, stored ids are never touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_support import CHATML, COUNTING, FORGETFUL, PLAIN, make_renderer, make_tokenizer

import rillflow
from rillflow.errors import BadRequest, ConfigError
from rillflow.gateway.trees.messages import PLAIN_READING, Message, ToolCall, message
from rillflow.gateway.trees.render import Rendered, Renderer, bodies
from rillflow.gateway.trees.tree import Canonical

TINY = Path(rillflow.__file__).parent / "assets" / "tiny"

USER = message("user", "how many?")
CALLING = message("assistant", "hm", [ToolCall("c1", "count", '{"box": "red"}')])
RESULT = message("tool", "12", call_id="c1")
ANSWER = message("assistant", "twelve")
NEXT = message("user", "sure?")
SYSTEM = message("system", "be brief")

HISTORIES = [
    ([USER, ANSWER, NEXT], 2),
    ([SYSTEM, USER, ANSWER, NEXT], 3),
    ([USER, CALLING, RESULT], 2),
    ([USER, CALLING, RESULT, RESULT], 2),
    ([USER, CALLING, RESULT, ANSWER, NEXT], 4),
    ([USER, CALLING, RESULT, NEXT], 2),
    ([USER, ANSWER], 2),
]


def text_of(renderer: Renderer, messages: list[Message], *, prompt: bool = True) -> str:
    return renderer._text(bodies(messages), None, prompt=prompt)


def behind(renderer: Renderer, history: list[Message], before: Canonical | None) -> Rendered | None:
    """Return what follows the answer, the second message of `history`, which was sampled without markers."""
    said = [*renderer.encode(history[1].body["content"]), renderer.end_token or 0]
    return renderer.after_answer(history, 2, None, said=said, before=before, reading=PLAIN_READING)


def test_probes_tell_templates_apart() -> None:
    assert make_renderer(CHATML).append_only
    assert make_renderer(PLAIN).append_only
    assert not make_renderer(FORGETFUL).append_only
    assert not make_renderer(COUNTING).append_only


@pytest.mark.parametrize(("history", "covered"), HISTORIES)
@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_an_extension_is_the_rest_of_the_whole_text(template: str, history: list[Message], covered: int) -> None:
    renderer = make_renderer(template)
    before = renderer.first(history[: covered - 1], None, b"").canonical
    end = renderer.end_token
    turn = text_of(renderer, history[:covered], prompt=False).removesuffix("<|im_end|>\n")
    said = renderer.encode(turn.removeprefix(text_of(renderer, history[: covered - 1])))
    assert end is not None
    after = renderer.after_answer(history, covered, None, said=[*said, end], before=before, reading=PLAIN_READING)
    cut = renderer.after_answer(history, covered, None, said=said, before=before, reading=PLAIN_READING)
    assert after is not None
    assert cut is not None
    whole = text_of(renderer, history)
    assert turn + "<|im_end|>" + renderer.decode(after.tokens) == whole
    assert list(cut.tokens) == [end, *after.tokens]


def test_an_edited_answer_follows_the_generation_prompt() -> None:
    renderer = make_renderer()
    found = renderer.after_prompt([ANSWER, NEXT])
    assert found is not None
    assert text_of(renderer, [USER]) + renderer.decode(found.tokens) == text_of(renderer, [USER, ANSWER, NEXT])


def test_a_template_that_rewrites_history_cannot_extend() -> None:
    renderer = make_renderer(FORGETFUL)
    thinking = message("assistant", "<think>hm</think>twelve")
    before = renderer.first([USER], None, b"").canonical
    assert behind(renderer, [USER, thinking, NEXT], before) is None
    assert behind(renderer, [USER, ANSWER, NEXT], before) is not None
    counting = make_renderer(COUNTING)
    before = counting.first([USER], None, b"").canonical
    assert behind(counting, [USER, ANSWER, NEXT], before) is None
    assert before is not None
    kept, rendered = counting.after_prompts([USER, ANSWER, NEXT], None, [before])
    assert (kept, counting.decode(rendered.tokens)) == (0, text_of(counting, [USER, ANSWER, NEXT]))


def test_a_template_without_an_end_of_turn() -> None:
    renderer = make_renderer(PLAIN)
    assert renderer.end_token is None
    said = renderer.encode("twelve")
    found = renderer.after_answer([USER, ANSWER, NEXT], 2, None, said=said, before=None, reading=PLAIN_READING)
    assert found is not None
    assert renderer.decode(found.tokens) == "\nuser: sure?\nassistant: "


def test_first_prompts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(make_tokenizer())
    tools = [{"type": "function", "function": {"name": "f"}}]
    first = renderer.first([USER], tools, b"f")
    monkeypatch.setattr(renderer, "_text", lambda *_, **__: pytest.fail("rendered again"))
    assert renderer.first([message("user", "how many?")], tools, b"f") is first


def test_kept_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(make_tokenizer())
    monkeypatch.setattr("rillflow.gateway.trees.render._CACHED_PROMPTS", 3)
    for number in range(5):
        renderer.first([message("user", str(number))], None, b"")
    assert len(renderer._prompts) == 3


def test_tool_arguments_are_written_once_not_quoted_twice() -> None:
    text = text_of(make_renderer(), [USER, CALLING])
    assert '"arguments": {"box": "red"}' in text


def test_templates_that_fail() -> None:
    refusing = make_tokenizer(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    )
    with pytest.raises(BadRequest, match="no system"):
        Renderer(refusing).first([SYSTEM, USER], None, b"")
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer(bare)


def test_the_shipped_policy() -> None:
    renderer = Renderer.load(str(TINY))
    assert renderer.append_only
    assert renderer.end_text == "<|im_end|>"
    assert renderer.end_token in renderer.stop_tokens
    found = behind(renderer, [USER, CALLING, RESULT], None)
    assert found is not None
    assert renderer.decode(found.tokens).startswith("\n<|im_start|>tool\n<tool_response>12</tool_response>")
