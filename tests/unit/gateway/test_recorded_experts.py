"""The experts that a mixture chose for the tokens of a path: gathered from its answers, kept by the session's log."""

from __future__ import annotations

import msgspec
import numpy as np
from gateway_support import chunk
from test_tree import NEXT, USER, Talk, said

from rillflow.engine.experts import UNKNOWN, pack, unpack
from rillflow.gateway.sessions import events
from rillflow.gateway.trees.messages import Message
from rillflow.gateway.trees.tree import Node, TokenTree


class Mixture(Talk):
    """Answers of an engine that records two experts for each token it reads: its place, and the number of the call."""

    calls = 0

    def answer_read(self, given: Node, reply: Message) -> Node:
        self.calls += 1
        ids = [*self.renderer.encode(str(reply.body["content"])), self.renderer.end_token or 0]
        read = np.arange(len(given.prompt()) + len(ids) - 1, dtype=np.uint16)
        chosen = np.stack([read, np.full_like(read, self.calls)], axis=1)
        node = self.tree.sample(given, 0.7)
        node.add(chunk(ids[:1]))
        node.add(msgspec.structs.replace(chunk(ids[1:]), experts=pack(chosen)))
        node.end("stop", reply)
        return node


def test_a_path_has_the_experts_of_every_token_but_its_last() -> None:
    talk = Mixture()
    first = talk.answer_read(talk.ask(USER), said("abc"))
    talk.answer_read(talk.ask(USER, said("abc"), NEXT), said("d"))
    (sample,) = talk.samples()
    chosen = unpack(sample.columns["experts"].tobytes())
    before = len(first.prompt())
    assert chosen[:-1, 0].tolist() == list(range(sample.tokens - 1))
    assert chosen[:-1, 1].tolist() == [1] * (before - 1) + [2] * (sample.tokens - before)
    assert chosen[-1].tolist() == [UNKNOWN, UNKNOWN]
    stored = sum(len(unpack(node.experts)) for node in talk.tree.nodes() if node.experts)
    assert stored == sample.tokens - 1, "each token's choice is kept once"


def test_an_answer_without_experts_leaves_its_tokens_unknown() -> None:
    talk = Mixture()
    first = talk.answer(talk.ask(USER), said("abc"))
    talk.answer_read(talk.ask(USER, said("abc"), NEXT), said("d"))
    (sample,) = talk.samples()
    assert unpack(sample.columns["experts"].tobytes())[:-1, 1].tolist() == [1] * (sample.tokens - 1)
    alone = Mixture()
    alone.answer(alone.ask(USER), said("abc"))
    assert "experts" not in alone.samples()[0].columns
    assert first.experts == b""


def test_a_restored_answer_has_its_experts() -> None:
    talk = Mixture()
    node = talk.answer_read(talk.ask(USER), said("abc"))
    tree, nodes = TokenTree(), {}
    for one in (talk.tree.root(b""), *node.path()):
        made = events.make(events.piece_of(one, talk.tree), tree, nodes)
        assert made is not None
        nodes[one.id] = made
    assert nodes[node.id].experts == node.experts
