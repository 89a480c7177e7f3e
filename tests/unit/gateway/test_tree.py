"""Token trees: longest-prefix matching, forks, and samples that train every sampled token exactly once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from gateway_support import COUNTING, FORGETFUL, chunk, make_renderer
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.gateway.trees.matching import Place
from rillflow.gateway.trees.messages import Message, ToolCall, message
from rillflow.gateway.trees.record import SessionRecord, samples, transcript
from rillflow.gateway.trees.render import Renderer
from rillflow.gateway.trees.tree import Node, TokenTree
from rillflow.types import COLUMNS
from soak import repetitions

RENDERER = make_renderer()
USER = message("user", "hello")
NEXT = message("user", "go on")


def said(text: str) -> Message:
    return message("assistant", text)


class Talk:
    """A tree with the gateway's two moves: place a history, sample an answer below it."""

    def __init__(self, renderer: Renderer = RENDERER) -> None:
        self.tree = TokenTree()
        self.renderer = renderer

    def ask(self, *history: Message, tools: Any = None, tools_key: bytes = b"") -> Node:
        return Place(self.tree, self.renderer, history, tools, tools_key).give()

    def answer(self, given: Node, reply: Message, ids: list[int] | None = None, finish: Any = "stop") -> Node:
        end = [self.renderer.end_token] if finish == "stop" else []
        node = self.tree.sample(given, 0.7)
        node.add(chunk(self.renderer.encode(str(reply.body["content"])) + end if ids is None else ids))
        node.end(finish, reply)
        return node

    def samples(self) -> list[Any]:
        return samples("p", self.tree)


def test_a_second_turn_extends_the_very_ids() -> None:
    talk = Talk()
    first = talk.ask(USER)
    answer = talk.answer(first, said("abc"))
    second = talk.ask(USER, said("abc"), NEXT)
    assert second.parent is answer
    assert second.prompt() == [*first.prompt(), *answer.tokens, *second.tokens]
    assert RENDERER.decode(second.prompt()) == RENDERER._text(
        [USER.body, said("abc").body, NEXT.body], None, prompt=True
    )
    assert second.fork == ""


def test_ids_that_would_be_tokenised_differently_are_kept() -> None:
    talk = Talk()
    first = talk.ask(USER)
    odd = [*RENDERER.encode("a"), *RENDERER.encode("b"), *RENDERER.encode("c")]
    assert RENDERER.encode(RENDERER.decode(odd)) != odd
    answer = talk.answer(first, said("abc"), [*odd, RENDERER.end_token or 0])
    second = talk.ask(USER, said("abc"), NEXT)
    assert second.parent is answer
    assert second.prompt()[len(first.prompt()) :][:3] == odd
    assert talk.samples()[0].columns["tokens"].tolist()[len(first.prompt()) :][:3] == odd


def test_a_turn_cut_by_length_gets_its_end_as_given_tokens() -> None:
    talk = Talk()
    answer = talk.answer(talk.ask(USER), said("abc"), finish="length")
    second = talk.ask(USER, said("abc"), NEXT)
    assert second.parent is answer
    assert second.tokens[0] == RENDERER.end_token
    talk.answer(second, said("x"))
    row = talk.samples()[0]
    ends = row.columns["mask"][row.columns["tokens"] == RENDERER.end_token]
    assert ends.tolist() == [0, 0, 0, 1]
    assert not row.truncated


def test_a_retry_is_a_sibling_and_both_train() -> None:
    talk = Talk()
    given_node = talk.ask(USER)
    talk.answer(given_node, said("one"))
    assert talk.ask(USER) is given_node
    talk.answer(given_node, said("two"))
    assert [row.trained for row in talk.samples()] == [len(RENDERER.encode("one")) + 1, len(RENDERER.encode("two")) + 1]


def test_an_edited_history_forks_where_it_diverges() -> None:
    talk = Talk()
    first = talk.ask(USER)
    talk.answer(first, said("mine"))
    forked = talk.ask(USER, said("edited"), NEXT)
    assert forked.parent is first
    assert forked.fork == "history"
    talk.answer(forked, said("fine"))
    rows = talk.samples()
    assert [row.fork for row in rows] == ["", "history"]
    assert rows[1].trained == len(RENDERER.encode("fine")) + 1
    assert RENDERER.decode(rows[1].columns["tokens"].tolist()).count("edited") == 1


def test_interleaved_paths_are_found_again() -> None:
    talk = Talk()
    other = message("user", "a subagent's task")
    one = talk.answer(talk.ask(USER), said("main"))
    two = talk.answer(talk.ask(other), said("sub"))
    assert talk.ask(USER, said("main"), NEXT).parent is one
    assert talk.ask(other, said("sub"), NEXT).parent is two


def test_another_question_without_an_answer_between_starts_anew() -> None:
    talk = Talk()
    talk.answer(talk.ask(USER), said("x"))
    assert talk.ask(USER, NEXT).path()[0].messages == (USER, NEXT)


def test_other_tools_never_share_a_path() -> None:
    talk = Talk()
    talk.answer(talk.ask(USER), said("x"))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert len(talk.ask(USER, said("x"), NEXT, tools=tools, tools_key=b"f").path()) == 1


def test_equal_answers_are_told_apart_by_their_call_ids() -> None:
    talk = Talk()
    first = talk.ask(USER)
    twins = [message("assistant", "", [ToolCall(f"c{n}", "f", "{}")]) for n in range(3)]
    nodes = [talk.answer(first, twin, [n]) for n, twin in enumerate(twins)]
    result = message("tool", "r")
    assert talk.ask(USER, twins[1], result).parent is nodes[1]
    renamed = message("assistant", "", [ToolCall("changed", "f", "{ }")])
    assert talk.ask(USER, renamed, message("tool", "s")).parent is nodes[0]


def test_a_template_that_rewrites_history_forks() -> None:
    talk = Talk(make_renderer(FORGETFUL))
    thought = said("<think>hm</think>x")
    first = talk.ask(USER)
    talk.answer(first, thought)
    forked = talk.ask(USER, thought, NEXT)
    assert forked.fork == "template"
    assert forked.path() == [first, forked]
    assert forked.messages == (thought, NEXT)
    assert "hm" not in talk.renderer.decode(forked.tokens)
    assert talk.renderer.decode(forked.prompt()) == talk.renderer._text(
        [USER.body, thought.body, NEXT.body], None, prompt=True
    )
    assert talk.ask(USER, thought, NEXT) is forked
    talk.answer(forked, said("plain"))
    rows = talk.samples()
    assert len(rows) == 2
    assert rows[1].fork == "template"
    extended = talk.ask(USER, thought, NEXT, said("plain"), NEXT)
    assert extended.parent is not None
    assert extended.parent.parent is forked


def test_a_template_that_always_rewrites_still_trains_once() -> None:
    talk = Talk(make_renderer(COUNTING))
    history: list[Message] = [USER]
    for number in range(4):
        reply = said(f"r{number}")
        talk.answer(talk.ask(*history), reply)
        history += [reply, NEXT]
    rows = talk.samples()
    assert [row.trained for row in rows] == [3, 3, 3, 3]


def test_abandoned_and_open_nodes_are_not_trained_or_extended() -> None:
    talk = Talk()
    first = talk.ask(USER)
    lost = talk.answer(first, said("lost"))
    lost.abandon()
    opened = talk.tree.sample(first, 0.7)
    opened.add(chunk([1, 2]))
    empty = talk.tree.sample(first, 0.7)
    empty.abandon()
    assert empty not in first.children
    assert talk.samples() == []
    assert talk.ask(USER, said("lost"), NEXT).parent is first
    talk.answer(first, said("kept"), finish="length")
    talk.answer(first, said("half"), [5, 6], finish="abort")
    assert [(row.trained, row.truncated) for row in talk.samples()] == [(4, True), (2, False)]


def test_columns_have_their_types_and_blanks() -> None:
    talk = Talk()
    first = talk.ask(USER)
    node = talk.tree.sample(first, 0.7)
    node.add(chunk([1, 2], version=3))
    node.add(chunk([3], version=5))
    node.end("stop", said("x"))
    talk.tree.sample(first, 0.7).end("stop", said("nothing"))
    (row,) = talk.samples()
    for name, column in row.columns.items():
        assert column.dtype == np.dtype(COLUMNS[name])
        assert len(column) == row.tokens
    masked = row.columns["mask"] == 0
    assert set(row.columns["versions"][masked]) == {-1}
    assert not row.columns["logprobs"][masked].any()
    assert not row.columns["raw_logprobs"][masked].any()
    assert not row.columns["temperatures"][masked].any()
    assert np.allclose(row.columns["temperatures"][~masked], 0.7)
    assert row.columns["versions"][~masked].tolist() == [3, 3, 5]
    assert row.columns["logprobs"][~masked].tolist() == [-0.25, -0.5, -0.25]
    assert (row.oldest, row.newest, row.trained) == (3, 5, 3)


def test_a_shared_answer_trains_in_the_first_leaf_only() -> None:
    talk = Talk()
    shared = talk.answer(talk.ask(USER), said("shared"))
    talk.answer(talk.ask(USER, said("shared"), NEXT), said("left"))
    talk.answer(talk.ask(USER, said("shared"), message("user", "or this")), said("right"))
    left, right = talk.samples()
    at = slice(len(shared.parent.prompt()) if shared.parent else 0, len(shared.prompt()))
    assert left.columns["tokens"][at].tolist() == right.columns["tokens"][at].tolist() == list(shared.tokens)
    assert left.columns["mask"][at].all()
    assert not right.columns["mask"][at].any()
    assert set(right.columns["versions"][at]) == {-1}


def test_transcripts_share_what_paths_share() -> None:
    talk = Talk()
    talk.answer(talk.ask(USER), said("shared"))
    talk.answer(talk.ask(USER, said("shared"), NEXT), said("left"))
    talk.answer(talk.ask(USER, said("shared"), message("user", "or this")), said("right"))
    first, second = transcript("p", talk.tree)
    assert [m["content"] for m in first["messages"]] == ["hello", "shared", "go on", "left"]
    assert (second["follows"], second["shared"]) == (0, 2)
    assert [m["content"] for m in second["messages"]] == ["or this", "right"]
    assert second["fork"] == "history"
    assert SessionRecord("s", 3, {"p": talk.tree}).transcript() == [first, second]
    assert SessionRecord("s", 3, {"p": talk.tree}).samples("q") == []


MOVES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 2), st.sampled_from(["stop", "length", "abort", "lost", "open"])),
    max_size=25,
)


@settings(max_examples=repetitions(50, 150), deadline=None)
@given(MOVES, st.sampled_from([RENDERER, make_renderer(FORGETFUL), make_renderer(COUNTING)]))
def test_every_sampled_token_trains_exactly_once(moves: list[tuple[int, int, str]], renderer: Renderer) -> None:
    talk = Talk(renderer)
    histories: list[list[Message]] = [[USER]]
    sampled: Counter[int] = Counter()
    fresh = 1_000_000
    for where, question, end in moves:
        history = histories[where % len(histories)]
        given_node = talk.ask(*history)
        node = talk.tree.sample(given_node, 0.7)
        ids = list(range(fresh, fresh + where % 4))
        fresh += len(ids)
        node.add(chunk(ids))
        reply = said(f"<think>t</think>{question}")
        if end != "open":
            node.end("stop" if end == "lost" else end, reply)  # type: ignore[arg-type]
        if end == "lost":
            node.abandon()
        elif end != "open":
            sampled.update(ids)
        histories.append([*history, reply, message("user", f"q{question}")])
    rows = talk.samples()
    trained = Counter(int(t) for row in rows for t in row.columns["tokens"][row.columns["mask"] == 1])
    assert trained == sampled
    assert all(row.trained for row in rows)
