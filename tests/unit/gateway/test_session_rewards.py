"""Rewards for calls, turns, leaves and sessions: to the right answers, or refused, never elsewhere."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
from gateway_support import chunk, make_renderer

from rillflow.gateway.sessions.rewards import Gift, Rewards
from rillflow.gateway.shapes import CallRefused
from rillflow.gateway.trees.matching import Place
from rillflow.gateway.trees.messages import Message, message
from rillflow.gateway.trees.record import SessionRecord
from rillflow.gateway.trees.tree import Node, TokenTree
from rillflow.types import COLUMNS

RENDERER = make_renderer()
USER, NEXT = message("user", "hello"), message("user", "go on")


def said(text: str) -> Message:
    return message("assistant", text)


class Played:
    """Two policies; `a` has two calls on one path, the second with two choices; `b` has one between them."""

    def __init__(self) -> None:
        numbers = count()
        self.trees = {"a": TokenTree(numbers), "b": TokenTree(numbers)}
        self.rewards = Rewards(self.trees)
        self.answer("a", [USER], "first", "x_0")
        self.answer("b", [USER], "between", "y_0")
        self.answer("a", [USER, said("first"), NEXT], "left", "z_0")
        self.answer("a", [USER, said("first"), NEXT], "right", "z_1")

    def answer(self, policy: str, history: list[Message], text: str, call: str) -> Node:
        tree = self.trees[policy]
        node = tree.sample(Place(tree, RENDERER, history, None, b"").give(), 1.0, call)
        node.add(chunk([*RENDERER.encode(text), RENDERER.end_token or 0]))
        node.end("stop", said(text))
        return node

    def record(self, incomplete: str = "") -> SessionRecord:
        return SessionRecord("s", 3, self.trees, rewards=self.rewards, incomplete=incomplete)


@pytest.fixture
def played() -> Played:
    return Played()


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-", "resp_", "msg_"])
def test_a_call_by_the_id_that_the_agent_saw(played: Played, prefix: str) -> None:
    assert played.rewards.give(0.5, call=f"{prefix}z_1").answers == ("z_1",)
    assert played.rewards.give(1.0, call=f"{prefix}z").answers == ("z_0", "z_1")
    assert played.rewards.give(2.0, call=f"{prefix}z_0").answers == ("z_0",)
    assert played.rewards.settle().answers == {"z_0": 2.0, "z_1": 1.0}


def test_turns_are_calls_in_the_order_of_their_beginning(played: Played) -> None:
    assert [played.rewards.give(1, turn=n).answers[0] for n in range(3)] == ["x_0", "y_0", "z_0"]
    assert played.rewards.give(1, turn=1, policy="a").answers == ("z_0", "z_1")
    lost = played.answer("b", [USER, NEXT], "lost", "w_0")
    lost.abandon()
    played.answer("b", [USER, NEXT], "tried again", "v_0")
    assert played.rewards.give(1, turn=3).answers == ("v_0",)


def test_rewards_of_answers_stand_at_their_last_tokens(played: Played) -> None:
    played.rewards.give(0.25, turn=0)
    played.rewards.give(-1.0, call="z_1")
    left, right = played.record().samples("a")
    (other,) = played.record().samples("b")
    assert "rewards" not in other.columns
    for row in (left, right):
        assert row.columns["rewards"].dtype == np.dtype(COLUMNS["rewards"])
    assert (left.reward, right.reward, other.reward) == (0.25, -1.0, None)
    first = len(RENDERER.encode("first"))
    at = int(np.flatnonzero(left.columns["mask"])[first])
    assert left.columns["rewards"][at] == 0.25
    assert np.isnan(np.delete(left.columns["rewards"], at)).all()
    assert right.columns["rewards"][-1] == -1.0
    assert np.isnan(right.columns["rewards"][:-1]).all(), "the shared answer trains elsewhere"


def test_leaves_are_looked_up_when_the_session_is_settled(played: Played) -> None:
    played.rewards.give(0.5, leaf=1, policy="a")
    played.rewards.give(0.75, leaf=2, policy="a")
    played.rewards.give(1.0, leaf=0, policy="nobody")
    settled = played.rewards.settle()
    assert settled.leaves == {"a": {1: 0.5}}
    assert settled.unknown == ("leaf 2 of policy 'a', which has 2", "leaf 0 of policy 'nobody', which has 0")
    played.answer("a", [message("user", "another")], "third", "u_0")
    assert [row.reward for row in played.record().samples("a")] == [None, 0.5, 0.75]
    assert [path.get("reward") for path in played.record().transcript()] == [None, 0.5, 0.75, None]


def test_a_leaf_without_its_policy_is_the_only_policys(played: Played) -> None:
    with pytest.raises(CallRefused, match="a, b"):
        played.rewards.give(1, leaf=0)
    alone = Rewards({"a": played.trees["a"]})
    assert alone.give(1, leaf=0).policy == "a"
    with pytest.raises(CallRefused, match="none yet"):
        Rewards({}).give(1, leaf=0)


def test_a_sessions_reward_is_every_policys_without_its_own(played: Played) -> None:
    assert played.rewards.settle().session == {}
    played.rewards.give(0.5, policy="b")
    assert played.rewards.settle().session == {"b": 0.5}
    played.rewards.give(1.0)
    assert played.rewards.settle().session == {"a": 1.0, "b": 0.5}
    played.rewards.give(2.0, policy="b")
    played.rewards.give(3.0, policy="typo")
    settled = played.rewards.settle()
    assert (settled.session, settled.unknown) == ({"a": 1.0, "b": 2.0}, ("policy 'typo'",))


@pytest.mark.parametrize(
    ("arguments", "status", "param"),
    [
        ({"value": math.nan}, 400, "value"),
        ({"value": math.inf, "call": "x"}, 400, "value"),
        ({"value": 1, "call": "x", "turn": 0}, 400, "call"),
        ({"value": 1, "leaf": 0, "turn": 0}, 400, "call"),
        ({"value": 1, "call": "chatcmpl-nothing"}, 404, "call"),
        ({"value": 1, "call": ""}, 404, "call"),
        ({"value": 1, "call": "x_1"}, 404, "call"),
        ({"value": 1, "call": "x", "policy": "b"}, 404, "call"),
        ({"value": 1, "turn": 3}, 404, "turn"),
        ({"value": 1, "turn": -1}, 404, "turn"),
        ({"value": 1, "turn": 1, "policy": "b"}, 404, "turn"),
        ({"value": 1, "leaf": -1, "policy": "a"}, 400, "leaf"),
        ({"value": 1, "policy": ""}, 400, "policy"),
        ({"value": 1, "policy": "p" * 1000}, 400, "policy"),
    ],
)
def test_what_names_nothing_is_refused(played: Played, arguments: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(CallRefused) as caught:
        played.rewards.give(**arguments)
    assert (caught.value.status, caught.value.param) == (status, param)
    if status == 404 and "policy" not in arguments:
        assert "x, y, z" in str(caught.value)
    assert played.rewards.state() == []


def test_the_numbers_of_leaves_are_bounded(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.gateway.sessions.rewards._MOST_LEAVES", 3)
    for leaf in range(3):
        played.rewards.give(1, leaf=leaf, policy="a")
    played.rewards.give(2, leaf=2, policy="a")
    with pytest.raises(CallRefused, match="at most 3"):
        played.rewards.give(1, leaf=3, policy="a")


def test_gifts_survive_as_json(played: Played) -> None:
    gifts = [
        played.rewards.give(1, call="z"),
        played.rewards.give(2, turn=2),
        played.rewards.give(3, leaf=0, policy="a"),
        played.rewards.give(4),
        played.rewards.give(5, policy="b"),
        played.rewards.give(6, call="z_0"),
    ]
    for kept in (gifts, played.rewards.state()):
        restored = Rewards(played.trees)
        restored.restore(msgspec.json.decode(msgspec.json.encode(kept), type=list[Gift]))
        assert restored.settle() == played.rewards.settle()


def test_a_reward_for_an_answer_that_was_lost_after_it_is_reported(played: Played) -> None:
    node = played.answer("b", [USER, NEXT], "lost", "w_0")
    played.rewards.give(1, call="w")
    node.abandon()
    settled = played.rewards.settle()
    assert (settled.answers, settled.unknown) == ({}, ("answer 'w_0'",))


def test_rewards_after_the_close_still_count(played: Played) -> None:
    record = played.record()
    assert record.settled().session == {}
    played.rewards.give(1)
    assert record.settled().session == {"a": 1.0, "b": 1.0}


def test_an_incomplete_record_can_be_looked_at_but_never_trained() -> None:
    played = Played()
    assert played.record().trainable
    record = played.record("a streamed answer was lost")
    assert not record.trainable
    assert len(record.samples("a")) == 2
    assert SessionRecord("s", 0, {}).settled().session == {}


def test_transcripts_show_rewards_and_seams(played: Played) -> None:
    node = played.trees["a"].sample(Place(played.trees["a"], RENDERER, [NEXT], None, b"").give(), 1.0, "s_0")
    for number, (ids, version, seam) in enumerate([([1], 1, ""), ([2, 3], 2, ""), ([4], 2, "moved"), ([], 3, "")]):
        node.add(chunk(ids, version, "stop" if number == 3 else None, seam=seam))
    node.end("stop", said("cut twice"))
    played.rewards.give(1, call="s")
    played.rewards.give(2, turn=0)
    seamed = played.record().samples("a")[2]
    assert (seamed.seams, seamed.oldest, seamed.newest) == (2, 1, 2)
    entries = played.record().transcript()
    assert entries[2]["seams"] == [
        {"message": 1, "token": 1, "cause": "weights"},
        {"message": 1, "token": 3, "cause": "moved"},
    ]
    assert entries[2]["rewards"] == [{"message": 1, "reward": 1.0}]
    assert entries[0]["rewards"] == [{"message": 1, "reward": 2.0}]
    assert not {"seams", "rewards"} & entries[1].keys()


def test_the_names_of_policies_are_bounded(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.gateway.sessions.rewards._MOST_POLICIES", 2, raising=False)
    for policy in ("a", "unknown"):
        played.rewards.give(1, policy=policy)
    played.rewards.give(2, policy="a")
    with pytest.raises(CallRefused, match="at most 2"):
        played.rewards.give(1, policy="another")
