"""Every fork is counted, and its cause names the message and the field in which the call left the earlier path."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from gateway_support import chunk, make_renderer

from rillflow.gateway.trees.matching import Place, RawPlace
from rillflow.gateway.trees.messages import Message, ToolCall, message
from rillflow.gateway.trees.record import cause, forks, forks_always
from rillflow.gateway.trees.tree import Node, TokenTree

RENDERER = make_renderer()
USER, NEXT = message("user", "hello"), message("user", "go on")
COUNT: list[dict[str, Any]] = [{"type": "function", "function": {"name": "count"}}]
BOTH = [*COUNT, {"type": "function", "function": {"name": "search"}}]


def said(text: str, *calls: str, arguments: str = "{}", **more: str) -> Message:
    return message("assistant", text, [ToolCall(id, "f", arguments) for id in calls], **more)


def system(text: str) -> Message:
    return message("system", text)


class Talk:
    """Calls of one agent, each of them answered; the last one is what a test asks about."""

    def __init__(self) -> None:
        self.tree = TokenTree()

    def turn(self, *history: Message, reply: Message, tools: list[dict[str, Any]] | None = None) -> Node:
        key = msgspec.json.encode(tools, order="sorted") if tools else b""
        return self.answer(Place(self.tree, RENDERER, history, tools, key).give(), reply)

    def answer(self, given: Node, reply: Message) -> Node:
        node = self.tree.sample(given, 1.0, f"call{given.id}_0")
        node.add(chunk([5, 6, RENDERER.end_token or 0]))
        node.end("stop", reply)
        return given

    def cause(self) -> str:
        return cause(self.tree, forks(self.tree)[-1])


def test_a_conversation_that_goes_on_has_no_fork() -> None:
    talk = Talk()
    talk.turn(USER, reply=said("a"))
    talk.turn(USER, said("a"), NEXT, reply=said("b"))
    assert forks(talk.tree) == []
    assert not forks_always(talk.tree)


@pytest.mark.parametrize(
    ("first", "reply", "second", "expected"),
    [
        (
            (system("Now: 12:00"), USER), said("a"), (system("Now: 12:01"), USER, said("a"), NEXT),
            "the client changes the system prompt: content of messages[0] differs at character 9: '1' instead of",
        ),
        (
            (USER,), said("a b"), (USER, said("a c"), NEXT),
            "the assistant's message differs: content of messages[1] differs at character 2: 'c' instead of 'b'",
        ),
        (
            (USER,), said("", "1", arguments='{"box": "x"}'), (USER, said("", "1", arguments='{"box": "y"}'), NEXT),
            "the assistant's message differs: tool_calls of messages[1] differs",
        ),
        (
            (USER,), said("a", reasoning="because"), (USER, said("a", reasoning="therefore"), NEXT),
            "the assistant's message differs: reasoning_content of messages[1] differs at character 0",
        ),
        (
            (message("user", "hello", name="Ann"),), said("a"), (USER, said("a"), NEXT),
            "the user's message differs: name of messages[0] differs",
        ),
        ((USER, NEXT), said("a"), (USER, said("a"), NEXT), "messages[1] has the role assistant, not user"),
        ((USER, NEXT), said("a"), (USER,), "the history ends before messages[1] of an earlier call"),
    ],
)  # fmt: skip
def test_the_cause_names_the_message_and_the_field(
    first: tuple[Message, ...], reply: Message, second: tuple[Message, ...], expected: str
) -> None:
    talk = Talk()
    talk.turn(*first, reply=reply)
    talk.turn(*second, reply=said("z"))
    assert len(forks(talk.tree)) == 1
    assert expected in talk.cause()


def test_another_list_of_tools_is_named() -> None:
    talk = Talk()
    talk.turn(USER, reply=said("a"), tools=COUNT)
    talk.turn(USER, said("a"), NEXT, reply=said("b"), tools=BOTH)
    assert talk.cause() == "the tool list changed: count, search instead of count"


def test_the_path_that_a_call_shares_most_with_is_compared() -> None:
    """Two agents take turns, and one of them edits its own history."""
    talk = Talk()
    talk.turn(system("plan"), USER, reply=said("a"))
    talk.turn(system("act"), USER, reply=said("b"))
    talk.turn(system("plan"), USER, said("A"), NEXT, reply=said("c"))
    assert "content of messages[2] differs at character 0: 'A' instead of 'a'" in talk.cause()


def test_a_raw_prompt_that_starts_anew_says_so() -> None:
    talk = Talk()
    talk.answer(RawPlace(talk.tree, RENDERER, "one").give(), said("a"))
    talk.answer(RawPlace(talk.tree, RENDERER, "two").give(), said("b"))
    assert talk.cause() == "the raw prompt does not begin with an earlier prompt and its answer"


def test_a_fork_at_every_call_is_told_from_a_few() -> None:
    talk = Talk()
    for turn in range(3):
        talk.turn(system(f"turn {turn}"), USER, reply=said("a"))
    assert forks_always(talk.tree)
    talk.turn(system("turn 2"), USER, said("a"), NEXT, reply=said("b"))
    talk.turn(system("turn 2"), USER, said("a"), NEXT, said("b"), NEXT, reply=said("c"))
    assert len(forks(talk.tree)) == 2
    assert not forks_always(talk.tree)


def test_what_nobody_answered_is_no_fork() -> None:
    talk = Talk()
    talk.turn(USER, reply=said("a"))
    Place(talk.tree, RENDERER, [system("other"), USER], None, b"").give()
    assert forks(talk.tree) == []
