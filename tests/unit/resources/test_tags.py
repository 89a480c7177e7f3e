"""Tags of workers, and the pool that gives workers by them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from rillflow.config import load_recipe
from rillflow.config.runs import Tag
from rillflow.errors import ConfigError, RunError
from rillflow.resources.placement import Pool, parse_tags, retagged
from rillflow.resources.workers import Worker, initial_workers


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rollout,train"], {"rollout", "train"}),
        (["train"], {"train"}),
        (["rollout", "train"], {"rollout", "train"}),
        (["none"], set()),
        (["+train"], {"rollout", "train"}),
        (["+train", "-rollout"], {"train"}),
        (["+train,-rollout"], {"train"}),
        (["-rollout"], set()),
    ],
)
def test_tags_are_set_or_changed(words: list[str], expected: set[str]) -> None:
    assert parse_tags(words, {"rollout"}) == expected


@pytest.mark.parametrize("words", [["+train", "rollout"], ["rolout"], ["+"], [""], ["none", "train"], [","]])
def test_what_is_no_tag_is_refused_with_what_to_say(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tags(words, {"rollout"})
    assert "rollout" in caught.value.hint


def test_the_last_worker_of_a_tag_keeps_it() -> None:
    recipe = load_recipe("quickstart")
    workers = initial_workers(recipe)
    for name, words in (("rollout-0", ["none"]), ("trainer-agent", ["-train", "+rollout"])):
        with pytest.raises(RunError, match=f"{name} cannot have the tags") as caught:
            retagged(recipe, workers, name, words)
        assert caught.value.hint
    changed = retagged(recipe, workers, "trainer-agent", ["+rollout"])
    assert retagged(recipe, changed, "rollout-0", ["none"])[1].tags == frozenset(), "now another one rolls out"


def test_setting_the_tags_of_a_lost_worker_has_it_tried_again() -> None:
    recipe = load_recipe("quickstart", ["rollout.nodes=2"])
    workers = [msgspec.structs.replace(worker, lost=worker.name == "rollout-1") for worker in initial_workers(recipe)]
    again = retagged(recipe, workers, "rollout-1", ["rollout"])
    assert not any(worker.lost for worker in again)


TAG_SETS = st.frozensets(st.sampled_from(["rollout", "train"]))


def worker(name: str, *tags: Tag, tflops: float | None = None, policy: str = "agent") -> Worker:
    bandwidth = None if tflops is None else 100.0
    return Worker(name=name, tags=frozenset(tags), policy=policy, tflops=tflops, bandwidth=bandwidth)


class PoolMachine(RuleBasedStateMachine):
    """A model beside the pool: the workers with their tags, and the requests that were not released."""

    names = Bundle("names")

    @initialize()
    def begin(self) -> None:
        self.pool = Pool()
        self.tags: dict[str, frozenset[Tag]] = {}
        self.count = 0

    @rule(target=names, tags=TAG_SETS, policy=st.sampled_from(["agent", "other"]), tflops=st.none() | st.floats(1, 10))
    def join(self, tags: frozenset[Tag], policy: str, tflops: float | None) -> str:
        self.count += 1
        name = f"worker-{self.count}"
        self.pool.join(worker(name, *tags, tflops=tflops, policy=policy))
        self.tags[name] = tags
        assert self.pool.active(name) is None
        return name

    @rule(name=consumes(names))
    def leave(self, name: str) -> None:
        """Also what a node's failure is to the pool."""
        before = self.pool.active(name)
        assert self.pool.leave(name) == before
        del self.tags[name]
        assert name not in self.pool

    @rule(tag=st.sampled_from(["rollout", "train"]), count=st.integers(0, 4), preempt=st.booleans())
    def ask(self, tag: Tag, count: int, preempt: bool) -> None:
        before = {name: self.pool.active(name) for name in self.tags}
        asked = self.pool.ask(tag, count, preempt=preempt)
        able = [name for name, tags in self.tags.items() if tag in tags and before[name] != tag]
        free = [name for name in able if before[name] is None]
        assert len(asked.assigned) == min(count, len(able if preempt else free)), "as many as there are, never more"
        assert set(asked.preempted) == {name for name in asked.assigned if before[name] is not None}
        assert not asked.preempted or set(free) <= set(asked.assigned), "idle ones come first"
        for name in self.tags:
            assert self.pool.active(name) == (tag if name in asked.assigned else before[name])

    @rule(names=st.lists(names, max_size=3))
    def release(self, names: list[str]) -> None:
        training = set(self.pool.doing("train")) - set(names)
        self.pool.release(names)
        assert set(self.pool.doing("train")) == training
        for name, tags in self.tags.items():
            if "rollout" in tags and name not in training:
                assert self.pool.active(name) == "rollout"

    @invariant()
    def each_does_what_it_can_and_one_thing_only(self) -> None:
        assert len(self.pool) == len(self.tags)
        doing = [self.pool.doing(tag) for tag in ("rollout", "train", None)]
        assert sorted(name for names in doing for name in names) == sorted(self.tags), "in exactly one of them"
        for name, tags in self.tags.items():
            assert self.pool.active(name) in (None, *tags)


TestPool = PoolMachine.TestCase


def test_the_pipeline_of_the_paper() -> None:
    """Section 4.3, step by step."""
    pool = Pool([worker("both", "rollout", "train"), worker("plays", "rollout")])
    assert set(pool.ask("rollout", 2).assigned) == {"both", "plays"}, "2: all are idle and roll out"
    assert pool.ask("train", 1) == (("both",), ("both",)), "3, 4: the one that can train is preempted"
    assert (pool.active("both"), pool.active("plays")) == ("train", "rollout"), "4: the other is not interrupted"
    assert pool.release(["both"]) == ("both",), "5: all roll out again"
    pool.join(worker("late", "train"))
    assert pool.ask("train", 1) == (("late",), ()), "4: an idle one that has joined meanwhile needs no preemption"


def test_training_goes_to_the_highest_priority_and_rollout_to_the_lowest() -> None:
    workers = [worker("slow", "rollout", "train", tflops=1.0), worker("fast", "rollout", "train", tflops=9.0)]
    assert Pool(workers).ask("train", 1).assigned == ("fast",)
    assert Pool(workers).ask("rollout", 1).assigned == ("slow",)


def test_of_equals_who_can_do_nothing_else_comes_first() -> None:
    workers = [worker("both", "rollout", "train"), worker("trains", "train"), worker("plays", "rollout")]
    assert Pool(workers).ask("train", 1).assigned == ("trains",)
    assert Pool(workers).ask("rollout", 1).assigned == ("plays",)


def test_only_workers_of_the_policy_train_it() -> None:
    pool = Pool([worker("a", "train", policy="solver"), worker("b", "train", policy="checker")])
    assert pool.ask("train", 2, policy="checker").assigned == ("b",)


@given(st.permutations(["a", "b", "c"]))
def test_who_is_preferred_comes_first_in_that_order(order: list[str]) -> None:
    pool = Pool([worker(name, "train", tflops=number) for number, name in enumerate("abc", 1)])
    assert pool.ask("train", 2, prefer=order).assigned == tuple(order[:2])


def test_a_name_joins_once() -> None:
    pool = Pool([worker("a", "train")])
    with pytest.raises(ValueError, match="already"):
        pool.join(worker("a", "rollout"))
