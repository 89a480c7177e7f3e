"""Which path a call continues, for everything that agents do to their histories, and what finding it costs."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_support import COUNTING, chunk, make_renderer

from rillflow.gateway.trees.matching import Place
from rillflow.gateway.trees.messages import Message, ToolCall, message
from rillflow.gateway.trees.record import samples
from rillflow.gateway.trees.render import Renderer
from rillflow.gateway.trees.tree import Node, TokenTree

RENDERER = make_renderer()
USER, NEXT = message("user", "hello"), message("user", "go on")
RESULT = message("tool", "12")
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]


def said(text: str, *calls: str) -> Message:
    return message("assistant", text, [ToolCall(id, "f", "{}") for id in calls])


class Talk:
    def __init__(self, renderer: Renderer = RENDERER) -> None:
        self.tree = TokenTree()
        self.renderer = renderer

    def ask(self, *history: Message, tools: bool = False) -> Node:
        return Place(self.tree, self.renderer, history, TOOLS if tools else None, b"f" if tools else b"").give()

    def answer(self, given: Node, reply: Message, ids: tuple[int, ...] = (5, 6)) -> Node:
        node = self.tree.sample(given, 1.0)
        node.add(chunk([*ids, self.renderer.end_token or 0]))
        node.end("stop", reply)
        return node

    def turn(self, *history: Message, reply: Message, ids: tuple[int, ...] = (5, 6)) -> Node:
        return self.answer(self.ask(*history), reply, ids)


# ---------------------------------------------------------------- the right path


def test_subagents_that_take_turns_each_keep_their_path() -> None:
    talk = Talk()
    histories = [[message("user", f"task {n}")] for n in range(3)]
    last: list[Node | None] = [None, None, None]
    for turn in range(4):
        for number, history in enumerate(histories):
            given = talk.ask(*history)
            assert given.parent is (last[number] or talk.tree.root(b""))
            last[number] = talk.answer(given, said(f"{number} says {turn}"))
            history += [said(f"{number} says {turn}"), NEXT]
    assert [row.trained for row in samples("p", talk.tree)] == [12, 12, 12]


def test_a_summary_in_place_of_the_history_is_a_path_of_its_own() -> None:
    talk = Talk()
    talk.turn(USER, reply=said("a"))
    talk.turn(USER, said("a"), NEXT, reply=said("b"))
    compact = talk.ask(message("user", "so far: a, b"), NEXT)
    assert (compact.path(), compact.fork) == ([compact], "history")
    last = talk.answer(compact, said("c"))
    assert talk.ask(message("user", "so far: a, b"), NEXT, said("c"), NEXT).parent is last


def test_a_message_changed_in_the_middle_forks_before_it() -> None:
    talk = Talk()
    one = talk.turn(USER, reply=said("a"))
    talk.turn(USER, said("a"), NEXT, reply=said("b"))
    forked = talk.ask(USER, said("a"), message("user", "changed"), said("b"), NEXT)
    assert forked.parent is one
    assert [m.body["content"] for m in forked.messages] == ["changed", "b", "go on"]
    assert forked.fork == "history"


def test_tools_that_change_in_the_middle_start_anew_and_come_back() -> None:
    talk = Talk()
    one = talk.turn(USER, reply=said("a"))
    with_tools = talk.ask(USER, said("a"), NEXT, tools=True)
    assert (len(with_tools.path()), with_tools.fork) == (1, "history")
    assert talk.ask(USER, said("a"), NEXT).parent is one


def test_parallel_equal_prompts_share_one_given_node() -> None:
    talk = Talk()
    given = talk.ask(USER)
    open_nodes = [talk.tree.sample(given, 1.0) for _ in range(3)]
    assert talk.ask(USER) is given
    for number, node in enumerate(open_nodes):
        node.add(chunk([number]))
        node.end("stop", said("same"))
    assert talk.ask(USER, said("same"), NEXT).parent is open_nodes[0]
    assert [row.trained for row in samples("p", talk.tree)] == [1, 1, 1]


def test_equal_answers_with_equal_results_keep_apart_by_their_call_ids() -> None:
    """The path of the other answer is longer, but the history names this one."""
    talk = Talk()
    given = talk.ask(USER)
    twins = [talk.answer(given, said("", f"c{n}"), (n,)) for n in range(2)]
    first = talk.ask(USER, said("", "c0"), RESULT)
    talk.answer(first, said("same"))
    second = talk.ask(USER, said("", "c1"), RESULT)
    assert second is not first
    assert (first.parent, second.parent) == (twins[0], twins[1])
    end = talk.answer(second, said("same"))
    assert talk.ask(USER, said("", "c1"), RESULT, said("same"), NEXT).parent is end
    assert talk.ask(USER, said("", "foreign"), RESULT) is first


def test_a_name_that_was_added_to_a_sampled_answer_does_not_count() -> None:
    talk = Talk()
    one = talk.turn(USER, reply=said("a"))
    named = message("assistant", "a", name="helper")
    assert talk.ask(USER, named, NEXT) is talk.ask(USER, said("a"), NEXT)
    assert talk.ask(USER, named, NEXT).parent is one


def test_names_in_messages_that_nobody_sampled_count() -> None:
    talk = Talk()
    shown = [talk.ask(USER, message("assistant", "a", name=name), NEXT) for name in ("", "one", "other")]
    assert len(set(shown)) == 3
    assert [node.fork for node in shown] == ["", "history", "history"]


@pytest.mark.parametrize("text", ["", " \n"])
def test_blank_text_beside_calls_does_not_count(text: str) -> None:
    talk = Talk()
    one = talk.turn(USER, reply=said("\n", "c0"))
    assert talk.ask(USER, said(text, "c0"), RESULT).parent is one
    assert talk.ask(USER, said("x", "c0"), RESULT).parent is not one


def test_equal_answers_keep_apart_under_a_template_that_rewrites() -> None:
    talk = Talk(make_renderer(COUNTING))
    given = talk.ask(USER)
    for n in range(2):
        talk.answer(given, said("", f"c{n}"), (n,))
    first, second = (talk.ask(USER, said("", f"c{n}"), RESULT) for n in range(2))
    assert first is not second
    assert [talk.ask(USER, said("", f"c{n}"), RESULT) for n in range(2)] == [first, second]


def test_an_answer_asked_about_again_under_a_template_that_rewrites() -> None:
    talk = Talk(make_renderer(COUNTING))
    talk.turn(USER, reply=said("a"))
    assert talk.ask(USER, said("a")) is talk.ask(USER, said("a"))


def test_a_template_that_rewrites_forks_from_the_last_prompt_that_it_keeps() -> None:
    """Nothing before the rewritten answer is stored a second time."""
    talk = Talk(make_renderer(FORGETTING))
    history = [USER]
    for number in range(3):
        reply = said(f"<think>{number}</think>a")
        talk.turn(*history, reply=reply)
        history += [reply, NEXT]
    path = talk.ask(*history).path()
    assert [node.kind for node in path] == ["given"] * 4
    assert [len(node.messages) for node in path] == [1, 2, 2, 2]
    assert {node.fork for node in path[1:]} == {"template"}


FORGETTING = (
    "{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{{ (m.content if loop.last else m.content.split('</think>')[-1]) ~ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# ---------------------------------------------------------------- counting


@pytest.mark.parametrize("template", [None, COUNTING, FORGETTING])
def test_counting_a_prompt_changes_nothing_and_is_right(template: str | None) -> None:
    talk = Talk(RENDERER if template is None else make_renderer(template))
    histories: list[list[Message]] = [[USER], [USER, said("a"), NEXT], [USER, said("b"), NEXT], [USER, said("a")]]
    for history in histories:
        before = [(node.id, len(node.children)) for node in talk.tree.nodes()], list(talk.tree.roots())
        counted = Place(talk.tree, talk.renderer, history, None, b"").count()
        assert Place(talk.tree, talk.renderer, history, TOOLS, b"f").count()
        assert before == ([(node.id, len(node.children)) for node in talk.tree.nodes()], list(talk.tree.roots()))
        given = talk.ask(*history)
        assert counted == len(given.prompt()) == Place(talk.tree, talk.renderer, history, None, b"").count()
        talk.answer(given, said("a"))


# ---------------------------------------------------------------- what it costs


class Counted(bytes):
    """A key that counts how often it is looked up or compared."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return super().__eq__(other)


def counted(given: Message) -> Message:
    return given._replace(key=Counted(given.key))


def test_a_match_looks_at_each_message_once_however_many_branches_there_are() -> None:
    """128 turns, each with 32 branches: a search over children would compare thousands of keys for each call."""
    talk = Talk()
    history: list[Message] = [USER]
    for turn in range(128):
        given = talk.ask(*history)
        for branch in range(32):
            talk.answer(given, said(f"answer {branch} in turn {turn}"), (branch,))
        for branch in range(31):
            talk.ask(*history, said(f"answer {branch} in turn {turn}"), NEXT)
        history += [said(f"answer 31 in turn {turn}"), NEXT]
    asked = [counted(one) for one in history]
    Counted.looks = 0
    match = talk.tree.match(b"", asked)
    assert match is not None
    assert match.covered == len(history) - 1
    assert Counted.looks <= 2 * len(history)
    Counted.looks = 0
    assert talk.tree.match(b"", [counted(message("user", "nothing like it")), *asked]) is None
    assert Counted.looks <= 2
