"""Reasoning that agents leave out of their histories, and templates that do."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_support import CHATML, DEEPSEEK_LIKE, QWEN_LIKE, ScriptedEngine, make_renderer, says

from rillflow.gateway import Renderer, SessionRecord, Sessions
from rillflow.gateway.answers import Answer
from rillflow.gateway.calls import Call, Policy, begin
from rillflow.gateway.trees.messages import Message, message
from rillflow.types import Sampling

USER, NEXT, RESULT = message("user", "hello"), message("user", "go on"), message("tool", "12")
# Writes the reasoning of every answer, always.
FAITHFUL = CHATML.replace(
    "~ m.content }}",
    "~ ('<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' if m.reasoning_content else '') ~ m.content }}",
)


class Agent:
    """Plays a session through the gateway's own calls."""

    def __init__(self, template: str, reasoning: str = "auto") -> None:
        self.renderer: Renderer = make_renderer(template)
        self.engine = ScriptedEngine()
        self.policy = Policy(self.engine, self.renderer, reasoning=reasoning)
        self.sessions = Sessions("secret")
        self.sessions.open("s", seed=1, group="g", deadline_seconds=60)
        self.calls = 0

    async def ask(self, *history: Message, reply: str) -> Answer:
        self.calls += 1
        self.engine.scripts.append(says(self.renderer, reply))
        call = Call("p", list(history), None, b"", Sampling(max_tokens=100))
        answer = begin(self.sessions.get("s"), self.policy, call, f"c{self.calls}", 0)
        await answer.whole()
        return answer

    def text(self, answer: Answer) -> str:
        return self.renderer.decode(answer.prompt)

    def whole(self, *history: Message) -> str:
        return self.renderer._text([said.body for said in history], None, prompt=True)

    def close(self) -> SessionRecord:
        return self.sessions.close("s")


def bare(answer: Answer) -> Message:
    choice = answer.choices[0]
    return message("assistant", choice.text, choice.calls)


def full(answer: Answer) -> Message:
    choice = answer.choices[0]
    return message("assistant", choice.text, choice.calls, reasoning=choice.reasoning)


@pytest.mark.parametrize("replay", [bare, full])
@pytest.mark.parametrize(("template", "reasoning"), [(FAITHFUL, "auto"), (CHATML, "think")])
async def test_an_append_only_template_keeps_the_sampled_reasoning(template: str, reasoning: str, replay: Any) -> None:
    agent = Agent(template, reasoning)
    assert agent.renderer.append_only
    first = await agent.ask(USER, reply="<think>\nhm\n</think>\n\none")
    assert (first.choices[0].reasoning, first.choices[0].text) == ("hm", "one")
    second = await agent.ask(USER, replay(first), NEXT, reply="<think>\nhm\n</think>\n\ntwo")
    node = first.choices[0].node
    assert second.prompt[: len(first.prompt) + len(node.tokens)] == [*first.prompt, *node.tokens]
    assert agent.text(second) == agent.whole(USER, full(first), NEXT)
    (row,) = agent.close().samples("p")
    assert (row.fork, row.trained) == ("", len(node.tokens) + len(second.choices[0].node.tokens))


@pytest.mark.parametrize("replay", [bare, full])
async def test_a_template_that_keeps_reasoning_since_the_last_question(replay: Any) -> None:
    agent = Agent(QWEN_LIKE)
    assert not agent.renderer.append_only
    first = await agent.ask(USER, reply="<think>\nhm\n</think>\n\none")
    second = await agent.ask(USER, replay(first), RESULT, reply="<think>\nso\n</think>\n\ntwo")
    node = first.choices[0].node
    assert second.prompt[: len(first.prompt) + len(node.tokens)] == [*first.prompt, *node.tokens]
    assert agent.text(second) == agent.whole(USER, full(first), RESULT)
    history = (USER, replay(first), RESULT, replay(second), NEXT)
    third = await agent.ask(*history, reply="<think>\nwell\n</think>\n\nthree")
    assert agent.text(third) == agent.whole(USER, full(first), RESULT, full(second), NEXT)
    assert "hm" not in agent.text(third)
    fourth = await agent.ask(*history, replay(third), RESULT, reply="four")
    assert fourth.prompt[: len(third.prompt)] == third.prompt
    rows = agent.close().samples("p")
    assert [row.fork for row in rows] == ["", "template"]
    assert sum(row.trained for row in rows) == sum(
        len(answer.choices[0].node.tokens) for answer in (first, second, third, fourth)
    )


async def test_turns_with_tools_do_not_render_the_history_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a template that drops reasoning too, until a question comes; then every case is right again."""
    agent = Agent(QWEN_LIKE)
    assert agent.renderer.near
    longest = 0
    written = agent.renderer._text

    def text(messages: Any, tools: Any, *, prompt: bool) -> str:
        nonlocal longest
        longest = max(longest, len(messages))
        return written(messages, tools, prompt=prompt)

    history: list[Message] = [USER]
    for number in range(8):
        answer = await agent.ask(*history, reply=f"<think>\nhm {number}\n</think>\n\n{number}")
        assert agent.text(answer) == written([said.body for said in history], None, prompt=True)
        monkeypatch.setattr(agent.renderer, "_text", text)
        history += [full(answer), RESULT]
    assert longest == 3
    edited = await agent.ask(*history[:-2], message("assistant", "edited", reasoning="by hand"), RESULT, reply="x")
    assert edited.choices[0].node.parent is not None
    assert edited.choices[0].node.parent.fork == "history"
    assert len(edited.choices[0].node.parent.messages) == 2
    last = await agent.ask(*history, NEXT, reply="y")
    assert agent.text(last) == agent.whole(*history, NEXT)
    assert [row.fork for row in agent.close().samples("p")] == ["", "history", "template"]


async def test_tool_turns_without_reasoning_are_one_path() -> None:
    """The template writes an empty thought into the last answer only, so no answer is compared as the last one."""
    agent = Agent(QWEN_LIKE)
    history: list[Message] = [USER]
    for number in range(8):
        answer = await agent.ask(*history, reply=f"said {number}")
        assert agent.text(answer) == agent.whole(*history)
        history += [full(answer), RESULT]
    (row,) = agent.close().samples("p")
    assert row.fork == ""


async def test_an_empty_thought_that_the_template_drops_forks() -> None:
    agent = Agent(QWEN_LIKE)
    first = await agent.ask(USER, reply="<think>\n\n</think>\n\none")
    second = await agent.ask(USER, full(first), RESULT, reply="two")
    assert agent.text(second) == agent.whole(USER, full(first), RESULT)
    assert [row.fork for row in agent.close().samples("p")] == ["", "template"]


async def test_an_answer_behind_an_answer_that_the_template_then_rewrites() -> None:
    agent = Agent(QWEN_LIKE)
    one = await agent.ask(USER, reply="<think>\n\n</think>\n\none")
    two = await agent.ask(USER, full(one), reply="<think>\nhm\n</think>\n\ntwo")
    three = await agent.ask(USER, full(one), full(two), RESULT, reply="three")
    assert agent.text(three) == agent.whole(USER, full(one), full(two), RESULT)
    assert [row.fork for row in agent.close().samples("p")] == ["", "template"]


@pytest.mark.parametrize("replay", [bare, full])
async def test_a_template_that_opens_the_reasoning_and_drops_it(replay: Any) -> None:
    agent = Agent(DEEPSEEK_LIKE)
    history: list[Message] = [USER]
    answers = []
    for number in range(3):
        answer = await agent.ask(*history, reply=f"hm {number}\n</think>\n\nsaid {number}")
        answers.append(answer)
        assert answer.choices[0].reasoning == f"hm {number}"
        assert agent.text(answer) == agent.whole(*history)
        history += [replay(answer), NEXT]
    assert "hm" not in agent.text(answers[-1])
    rows = agent.close().samples("p")
    assert [row.fork for row in rows] == ["", "template", "template"]
    assert [row.trained for row in rows] == [len(answer.choices[0].node.tokens) for answer in answers]
    for row, answer in zip(rows, answers, strict=True):
        assert row.columns["tokens"].tolist() == [*answer.prompt, *answer.choices[0].node.tokens]


async def test_equal_answers_are_told_apart_by_their_reasoning() -> None:
    agent = Agent(FAITHFUL)
    one = await agent.ask(USER, reply="<think>\nfirst\n</think>\n\nsame")
    two = await agent.ask(USER, reply="<think>\nsecond\n</think>\n\nsame")
    after_two = await agent.ask(USER, full(two), NEXT, reply="x")
    after_one = await agent.ask(USER, full(one), NEXT, reply="y")
    after_any = await agent.ask(USER, bare(two), message("user", "else"), reply="z")
    assert "second" in agent.text(after_two)
    assert "first" in agent.text(after_one)
    assert "first" in agent.text(after_any)
    changed = message("assistant", "same", reasoning="not what was thought")
    edited = await agent.ask(USER, changed, NEXT, reply="w")
    assert agent.text(edited) == agent.whole(USER, changed, NEXT)
    assert edited.choices[0].node.parent is not None
    assert edited.choices[0].node.parent.fork == "history"
