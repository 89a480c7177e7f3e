from __future__ import annotations

import json
import logging

import pytest
from hook_groups import Played, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.config import DataflowConfig
from rillflow.dataflow.hooks.base import KeyedState
from rillflow.dataflow.hooks.curators import Greso, Solved
from rillflow.dataflow.hooks.running import Hooks
from rillflow.errors import RunError
from soak import repetitions


class Table(dict):
    """The ledger's table of changes: (hook, key) and value."""

    def save(self, hooks: Hooks) -> int:
        rows = hooks.changes()
        for hook, key, text in rows:
            self[hook, key] = text
        return len(rows)

    def rows(self):
        return [(hook, key, text) for (hook, key), text in self.items()]


class Counting:
    """A user's filter that has nothing but `state` and `restore`."""

    def __init__(self) -> None:
        self.seen = 0

    def keep(self, group):
        self.seen += 1
        return True

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = state["seen"]


GROUP = Played(prompt("a"), [1.0, 1.0])

# ---------------------------------------------------------------- keyed state


def test_keyed_state_tells_what_changed_once():
    state = KeyedState()
    assert state.changes() == {}
    state.put("a", 1)
    state.put("b", [1, 2])
    assert state.changes() == {"a": 1, "b": [1, 2]}
    assert state.changes() == {}
    state.put("a", 1)
    state.put("b", None)
    state.put("never", None)
    assert state.changes() == {"b": None}
    assert state.state() == {"a": 1}


def test_keyed_state_forgets_what_was_not_saved():
    state = KeyedState()
    state.put("a", 1)
    state.restore({"b": 2})
    assert (state.state(), state.changes()) == ({"b": 2}, {})


# ---------------------------------------------------------------- rows


def test_only_what_changed_is_written():
    greso, counting = Greso(), Counting()
    hooks, table = Hooks(curators=[("greso", greso)], filters=[("counting", counting)]), Table()
    assert table.save(hooks) == 0
    for number in range(100):
        greso.observe(Played(prompt(f"p{number}"), [1.0, 1.0]))
    assert table.save(hooks) == 101  # and the tally
    assert table.save(hooks) == 0
    hooks.observe(GROUP)
    hooks.verdict(GROUP)
    assert sorted(key for _, key, _ in hooks.changes()) == ["", "@a", "tally"]
    assert hooks.changes() == []


def test_a_prompt_back_to_its_default_is_saved_as_null():
    hooks, table = Hooks(curators=[("solved", Solved())]), Table()
    for rewards in ([1.0], [0.0]):
        hooks.observe(Played(prompt("a"), rewards))
        table.save(hooks)
    assert table == {("solved", "@a"): "null"}
    hooks.restore(table.rows())
    assert hooks.curators[0][1].state() == {}


def test_hooks_of_one_name_and_of_any_kind_are_saved_apart():
    class Sampler(Counting):
        def pick(self, ready, want):
            return []

    hooks = Hooks(
        sampler=Sampler(),
        filters=[("mine", Counting()), ("mine", Counting()), ("mine", Counting())],
        curators=[("greso", Greso()), ("greso", Greso(easy_above=2))],
    )
    hooks.observe(GROUP)
    hooks.verdict(GROUP)
    hooks.sampler.seen = 5
    table = Table()
    table.save(hooks)
    assert sorted({hook for hook, _ in table}) == ["Sampler", "greso", "greso#2", "mine", "mine#2", "mine#3"]
    assert json.loads(table["greso", "@a"])[1] == "easy"
    assert json.loads(table["greso#2", "@a"])[1] == "hard"


def test_the_inner_sampler_of_replay_is_saved_too(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    picks = 0\n    def pick(self, ready, want):\n        self.picks += 1\n        return []\n"
        "    def state(self):\n        return self.picks\n    def restore(self, state):\n        self.picks = state\n"
    )
    config = {"sampler": {"replay": {"ratio": 0.5, "fresh": f"{tmp_path}/mine.py:Mine"}}}
    hooks = Hooks.of(DataflowConfig.model_validate(config))
    hooks.pick([], 0)
    assert hooks.changes() == [("Mine", "", "1")]


def test_restore_takes_everything_back():
    """The transaction of the last changes was rolled back, and with it the hooks' state."""
    greso, counting = Greso(), Counting()
    hooks, table = Hooks(curators=[("greso", greso)], filters=[("counting", counting)]), Table()
    hooks.observe(GROUP)
    hooks.verdict(GROUP)
    table.save(hooks)
    saved = greso.state(), counting.state()
    hooks.observe(GROUP)
    hooks.verdict(GROUP)
    hooks.changes()  # observed, but the transaction failed
    hooks.restore(table.rows())
    assert (greso.state(), counting.state()) == saved
    assert hooks.changes() == []
    hooks.restore([])
    assert (greso.state(), counting.state()) == ({}, {"seen": 0})
    hooks.verdict(GROUP)
    assert hooks.changes() == [("counting", "", '{"seen":1}')]


def test_rows_of_hooks_that_are_gone_are_passed_over():
    hooks = Hooks(filters=[("counting", Counting())])
    hooks.restore([("other", "", "{}"), ("counting", "", '{"seen": 3}')])
    assert hooks.filters[0][1].seen == 3


def test_a_hook_that_cannot_be_restored_is_named_and_the_others_are():
    class Forgetful(Counting):
        def restore(self, state):
            raise KeyError("state")

    hooks = Hooks(filters=[("forgetful", Forgetful()), ("counting", Counting())])
    rows = [("forgetful", "", '{"seen": 3}'), ("counting", "", '{"seen": 3}')]
    with pytest.raises(RunError, match="the state of forgetful cannot be restored: KeyError"):
        hooks.restore(rows)
    assert hooks.filters[1][1].seen == 3


def test_a_state_that_is_no_json_is_said_once_and_the_saved_one_stays(caplog):
    class Odd(Counting):
        def state(self):
            return {"seen": self.seen if self.seen < 2 else {1}}

    hooks = Hooks(filters=[("odd", Odd()), ("counting", Counting())])
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            hooks.verdict(GROUP)
            assert ("odd", "", '{"seen":1}') in hooks.changes() or hooks.filters[0][1].seen > 1
    assert len(caplog.records) == 1
    assert "odd" in caplog.text
    assert hooks.filters[1][1].seen == 5


# ---------------------------------------------------------------- a checkpoint changes no decision

PROMPTS = [prompt(f"p{number}", "ab"[number % 2], level=number) for number in range(6)]
DATAFLOW = {
    "curators": [
        {"solved": {"times": 1, "rest": 2}},
        {"greso": {"floor_easy": 0, "floor_hard": 0.1, "easy_above": 0.4, "step": 0.4}},
        {"curriculum": {"start": 0.2, "end": 0.9, "versions": 5}},
        {"greso": {"seed": 3}},
        {"mixing": {"weights": {"a": 1, "b": 3}, "patience": 4}},
    ],
}
PLACES = st.integers(0, len(PROMPTS) - 1)
EVENTS = st.one_of(
    st.tuples(st.just("admit"), PLACES),
    st.tuples(st.just("observe"), PLACES, st.sampled_from([(0, 0), (1, 1), (0, 1), (1, 1, 0.5)])),
    st.tuples(st.just("version"), st.integers(0, 7)),
    st.tuples(st.just("save")),
)


def play(hooks: Hooks, events, table: Table) -> list[list[bool]]:
    """Return the decision of each curator on the prompts, asked separately."""
    said = []
    for kind, *what in events:
        if kind == "admit":
            said.append([curator.admit(PROMPTS[what[0]]) for _, curator in hooks.curators])
        elif kind == "observe":
            hooks.observe(Played(PROMPTS[what[0]], list(what[1])))
        elif kind == "version":
            hooks.on_version(what[0])
        else:
            table.save(hooks)
    return said


@settings(max_examples=repetitions(50, 200))
@given(st.lists(EVENTS, max_size=40), st.lists(EVENTS, max_size=40))
def test_a_restored_run_decides_as_the_uninterrupted_one(before, after):
    config = DataflowConfig.model_validate(DATAFLOW)
    uninterrupted, table = Hooks.of(config), Table()
    play(uninterrupted, [*before, ("save",)], table)
    restored = Hooks.of(config)
    restored.restore(table.rows())
    assert play(restored, after, Table(table)) == play(uninterrupted, after, Table(table))
    for (_, one), (_, other) in zip(restored.curators, uninterrupted.curators, strict=True):
        assert one.state() == other.state()


@settings(max_examples=repetitions(30, 100))
@given(st.lists(EVENTS, max_size=30), st.lists(EVENTS, max_size=30), st.lists(EVENTS, max_size=30))
def test_a_transaction_taken_back_leaves_no_trace(before, lost, after):
    config = DataflowConfig.model_validate(DATAFLOW)
    hooks, table = Hooks.of(config), Table()
    play(hooks, [*before, ("save",)], table)
    play(hooks, lost, Table())  # its changes never reach the table
    hooks.restore(table.rows())
    fresh = Hooks.of(config)
    fresh.restore(table.rows())
    one, other = Table(table), Table(table)
    assert play(hooks, [*after, ("save",)], one) == play(fresh, [*after, ("save",)], other)
    assert one == other


def test_a_value_that_is_no_json_takes_no_other_with_it(caplog):
    state = KeyedState()
    hooks = Hooks(filters=[("keyed", state)])
    state.put("good", 1)
    state.put("bad", {1})
    state.put("better", 2)
    with caplog.at_level(logging.ERROR):
        assert hooks.changes() == [("keyed", "good", "1"), ("keyed", "better", "2")]
    assert "the state of keyed could not be told" in caplog.text
