"""Tasks and groups: leases, endings, retries, losses, completion."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from dataflow_world import POLICY, RULES, prompts, sample
from rillflow.dataflow.hooks.running import Hooks
from rillflow.errors import BadRequest, LeaseLost
from rillflow.types import Ack, Row


def test_admission_is_one_batch_on_policy(make_world):
    world = make_world()
    leases = world.lease()
    assert [lease.task.id for lease in leases] == ["t000000.0", "t000000.1", "t000001.0", "t000001.1"]
    assert leases[0].task.prompt.payload == {"n": 0}
    assert leases[0].seconds == RULES.task_lease
    assert world.lease() == []


def test_admission_follows_the_bound(make_world):
    assert len(make_world(staleness=3).lease()) == (3 + 1) * 2 * 2


def test_leases_keep_order_and_groups_together(make_world):
    world = make_world(staleness=1)
    assert [lease.task.id for lease in world.lease(3)] == ["t000000.0", "t000000.1", "t000001.0"]
    assert [lease.task.id for lease in world.lease(1)] == ["t000001.1"]


def test_a_group_stays_on_its_node_and_others_take_it_rather_than_idle(make_world):
    world = make_world(staleness=1)
    assert [lease.task.id for lease in world.lease(3)] == ["t000000.0", "t000000.1", "t000001.0"]
    assert [lease.task.id for lease in world.lease(1, node="n1")] == ["t000002.0"]
    assert [lease.task.id for lease in world.lease(2)] == ["t000001.1", "t000003.0"]
    assert [lease.task.id for lease in world.lease(9, node="n1")] == ["t000002.1", "t000003.1"]


def test_groups_of_a_node_that_is_gone_are_everybodys(make_world):
    world = make_world(staleness=1)
    world.lease(1)
    world.clock.time += RULES.node_timeout + 1
    world.beat(node="n1")
    world.beat(node="n2")
    world.ledger.expire()
    assert [lease.task.id for lease in world.lease(1, node="n1")] == ["t000000.0"]


def test_on_policy_tasks_go_out_in_order_whoever_asks(make_world):
    world = make_world()
    assert [lease.task.id for lease in world.lease(1)] == ["t000000.0"]
    assert [lease.task.id for lease in world.lease(2, node="n1")] == ["t000000.1", "t000001.0"]


def test_seeds_depend_on_the_run_the_prompt_and_the_place_alone(make_world):
    first, second, other = make_world(), make_world(), make_world(seed=8)
    seeds = [lease.task.seed for lease in first.lease()]
    assert seeds == [lease.task.seed for lease in second.lease()]
    assert len(set(seeds)) == len(seeds)
    assert not set(seeds) & {lease.task.seed for lease in other.lease()}
    lost = first.lease(node="n1")
    assert lost == []
    first.clock.time += 60
    first.ledger.expire()
    assert [lease.task.seed for lease in first.lease()] == seeds


def test_a_complete_is_taken_once(make_world):
    world = make_world()
    lease = world.lease()[0]
    assert world.done(lease).accepted
    assert world.done(lease).accepted
    assert world.check()["samples"] == 1
    assert not world.fail(lease).accepted


def test_an_unknown_attempt_is_refused(make_world):
    world = make_world()
    lease = world.lease()[0]
    other = type(lease)(task=lease.task, attempt="t000000.0-9", seconds=1)
    assert world.done(other).reason == "there is no such attempt"


def test_a_late_complete_changes_nothing(make_world):
    world = make_world()
    late = world.lease()[0]
    world.clock.time += RULES.task_lease + 1
    world.ledger.expire()
    again = next(lease for lease in world.lease() if lease.task.id == late.task.id)
    assert again.attempt != late.attempt
    ack = world.done(late)
    assert not ack.accepted
    assert "lease_expired" in ack.reason or "node_gone" in ack.reason
    assert world.done(again).accepted
    assert not world.done(late).accepted
    assert world.check()["samples"] == 1


def test_a_lease_is_renewed_by_heartbeats(make_world):
    world = make_world()
    lease = world.lease(1)[0]
    for _ in range(10):
        world.clock.time += 9
        assert world.beat([lease.attempt]).lost == []
        world.ledger.expire()
    assert world.task(lease.task.id) == "leased"
    assert world.beat(["nonsense"]).lost == ["nonsense"]
    assert world.beat([lease.attempt], node="n1").lost == [lease.attempt]


def test_failed_tasks_are_retried_then_fail(make_world):
    world = make_world(group_size=1)
    for attempt in range(3):
        lease = world.lease(1)[0]
        assert lease.attempt == f"t000000.0-{attempt + 1}"
        assert world.fail(lease).accepted
        assert world.fail(lease).accepted  # the same news again
        world.clock.time += 11
        world.beat()
    assert world.group("t000000") == ("failed", "timeout")
    assert world.check()["train.failed.timeout"] == 1
    assert world.ledger.groups.outstanding == 2  # another prompt took the place


def test_a_retry_prefers_another_node_for_a_while(make_world):
    world = make_world()
    world.beat(node="n1")
    lease = world.lease(1)[0]
    world.fail(lease)
    assert lease.task.id not in {other.task.id for other in world.lease()}
    assert [other.task.id for other in world.lease(node="n1")] == [lease.task.id]


def test_a_retry_returns_to_the_only_node(make_world):
    world = make_world()
    lease = world.lease(1)[0]
    world.fail(lease)
    assert world.lease(1)[0].task.id == lease.task.id


def test_a_retry_is_not_kept_for_others_for_ever(make_world):
    world = make_world()
    world.beat(node="n1")
    lease = world.lease(1)[0]
    world.fail(lease)
    world.clock.time += RULES.node_timeout
    world.beat(node="n1")
    assert world.lease(1)[0].task.id == lease.task.id


def test_a_silent_node_loses_its_leases_at_once(make_world):
    world = make_world()
    leases = world.lease()
    world.clock.time += RULES.node_timeout + 0.1
    world.ledger.expire()
    assert world.ledger.nodes.healthy == 0
    assert world.beat([lease.attempt for lease in leases]).lost == [lease.attempt for lease in leases]
    assert world.ledger.nodes.healthy == 1
    assert len(world.lease()) == len(leases)


def test_a_node_that_joins_again_loses_the_leases_of_its_former_life(make_world):
    world = make_world()
    leases = world.lease()
    assert len(world.lease(life="b")) == len(leases)
    assert not world.done(leases[0]).accepted
    with pytest.raises(LeaseLost):
        world.lease(life="a")
    assert world.beat([leases[0].attempt], life="a").lost == [leases[0].attempt]


def test_nodes_that_die_use_up_no_attempt_but_not_for_ever(make_world):
    world = make_world(group_size=1, batch_groups=1)
    for life in range(world.rules.most_returns):
        assert [lease.task.id for lease in world.lease(life=str(life))] == ["t000000.0"]
    world.lease(life="last")
    assert world.group("t000000") == ("failed", "node_restarted")


def test_a_group_goes_on_without_tasks_that_failed_for_good(make_world):
    world = make_world(group_size=3, attempts=1)
    leases = world.lease()
    world.fail(leases[0])
    for lease in leases[1:]:
        world.done(lease)
    batch = world.batch()
    first = [entry for entry in batch.samples if entry.group == "t000000"]
    assert [entry.id for entry in first] == ["t000000.1.0", "t000000.2.0"]
    assert (first[0].group_mean, first[0].group_std, first[0].group_size) == (1.5, 0.5, 2)


def test_a_group_with_one_success_fails(make_world):
    world = make_world(group_size=2, attempts=1)
    leases = world.lease()
    world.fail(leases[0], "crash")
    world.done(leases[1])
    assert world.group("t000000") == ("failed", "crash")


def test_groups_of_one_are_kept(make_world):
    world = make_world(group_size=1)
    world.play_all()
    assert len(world.batch().samples) == 2


def test_zero_variance_is_filtered_and_replaced(make_world):
    world = make_world()
    for lease in world.lease():
        world.done(lease, reward=1.0 if lease.task.group == "t000000" else None)
    assert world.group("t000000") == ("filtered", "zero_variance")
    assert {lease.task.group for lease in world.lease()} == {"t000002"}
    assert world.check()["train.filtered.zero_variance"] == 1


def test_the_batch_is_the_smallest_prefix_with_enough_survivors(make_world):
    world = make_world(batch_groups=3)
    dull = {"t000000", "t000002", "t000003"}
    while leases := world.lease():
        for lease in reversed(leases):  # whatever the order of completion
            world.done(lease, reward=0.0 if lease.task.group in dull else None)
    batch = world.batch()
    assert [entry.id for entry in batch.samples] == [
        f"{group}.{place}.0" for group in ("t000001", "t000004", "t000005") for place in (0, 1)
    ]
    assert world.ledger.db.counter("cursor") == 6


@pytest.mark.parametrize("samples", [[], [sample(0, trained=0)]])
def test_an_episode_without_model_calls_counts_as_failed(make_world, samples):
    world = make_world(attempts=1)
    lease = world.lease()[0]
    ack = world.done(lease, samples=samples)
    assert (ack.accepted, ack.reason) == (True, "no_model_call")
    assert world.done(lease, samples=samples).accepted
    assert world.task(lease.task.id) == "failed"


def test_a_reward_that_is_no_number_is_a_failure_and_never_zero(make_world):
    world = make_world()
    lease = world.lease()[0]
    assert world.done(lease, reward=math.nan).reason == "bad_reward"
    assert world.task(lease.task.id) == "pending"


@pytest.mark.parametrize("bad", [sample(3, newest=2), sample(-1), sample(0, trained=9)])
def test_a_sample_that_contradicts_itself_is_refused_whole(make_world, bad):
    world = make_world()
    lease = world.lease()[0]
    with pytest.raises(BadRequest):
        world.done(lease, samples=[sample(0), bad])
    assert world.task(lease.task.id) == "leased"
    assert world.check()["samples"] == 0


def test_a_filter_that_raises_ends_its_group_as_failed(make_world):
    class Broken:
        def keep(self, group):
            raise KeyError("x")

    world = make_world(hooks=Hooks(filters=[("broken", Broken())]))
    for lease in world.lease(2):
        world.done(lease)
    assert world.group("t000000") == ("failed", "filter broken raised KeyError")


def test_rewards_too_large_to_train_on_are_failures_and_block_no_batch(make_world):
    world = make_world(attempts=1)
    huge, other, *rest = world.lease()
    assert world.done(huge, 1.7e308).reason == world.done(other, -1.7e308).reason == "bad_reward"
    assert world.group("t000000") == ("failed", "bad_reward")
    for lease in rest:
        world.done(lease)
    batch = world.step()
    for entry in batch.samples:
        assert math.isfinite(entry.group_mean)
        assert math.isfinite(entry.group_std)


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (np.bool_(True), ("ready", "")),
        (np.bool_(False), ("filtered", "mine")),
        (1, ("ready", "")),
        (None, ("filtered", "mine")),
        ("", ("filtered", "mine")),
        ("too long", ("filtered", "too long")),
        ("x" * 5000, ("filtered", "x" * 200)),
    ],
)
def test_a_filter_may_answer_with_whatever_is_true_or_false(make_world, answer, end):
    class Mine:
        def keep(self, group):
            return answer

    world = make_world(hooks=Hooks(filters=[("mine", Mine())]))
    for lease in world.lease(2):
        assert world.done(lease).accepted
    assert world.group("t000000") == end


def test_curators_skip_observe_and_keep_their_state(make_world):
    class Odd:
        seen: list[str]

        def __init__(self):
            self.seen, self.versions = [], []

        def admit(self, prompt):
            return prompt.payload["n"] % 2 == 1

        def observe(self, group):
            self.seen.append(group.prompt.id)
            assert len(group.rewards) == len(group.lengths) == len(group.truncated) == 2

        def on_version(self, version):
            self.versions.append(version)

        def state(self):
            return {"seen": self.seen, "versions": self.versions}

        def restore(self, state):
            self.seen, self.versions = state["seen"], state["versions"]

    curator = Odd()
    world = make_world(hooks=Hooks(curators=[("odd", curator)]))
    world.step()
    world.ledger.commit()
    assert (curator.seen, curator.versions) == (["p1", "p3"], [1])
    curator.seen = ["forgotten"]
    world.crash()
    assert curator.seen == ["p1", "p3"]
    assert world.check()["train.admitted"] == 4
    assert world.ledger.db.counter("skipped") == 4


def test_a_curator_that_raises_ends_nothing(make_world):
    class Broken:
        def __getattr__(self, name):
            def fail(*_):
                raise KeyError(name)

            return fail

    world = make_world(hooks=Hooks(curators=[("broken", Broken())]))
    world.step()
    world.ledger.commit()
    assert world.head == 1


def test_too_many_failures_end_the_run_with_the_last_error(make_world):
    world = make_world(max_failures=3)
    for _ in range(3):
        world.fail(world.lease(1)[0], "boom")
    assert world.ledger.phase == "ended"
    assert world.ledger.reason == "too many failures: boom: it hung"
    assert world.lease() == []
    world.crash(resume=True)
    assert world.ledger.phase == "training"
    assert len(world.lease()) == 4


def test_a_success_between_failures_lets_the_run_go_on(make_world):
    world = make_world(max_failures=2, attempts=9)
    for _ in range(5):
        world.fail(world.lease(1)[0])
        world.done(world.lease(1)[0])
        if world.ledger.shares.count(POLICY, "ready") == 2:
            world.commit(world.batch())
    assert world.ledger.phase == "training"


def test_prompts_that_changed_are_noticed(make_world):
    world = make_world()
    world.source = prompts(49)
    with pytest.raises(Exception, match="started with 50 prompts"):
        world.crash()
    world.source = prompts(50)
    world.crash()


def test_numbers_that_do_not_fit_are_refused_whole(make_world):
    world = make_world()
    lease = world.lease()[0]
    with pytest.raises(BadRequest, match="out of range"):
        world.done(lease, samples=[sample(0, row=Row(unit="u", segment=0, offset=1 << 63, length=8))])
    assert world.task(lease.task.id) == "leased"
    assert world.done(lease).accepted


def test_one_bad_completion_among_many_is_refused_alone(make_world):
    world = make_world()
    first, second, third = world.lease(3)
    news = [world.news(first), world.news(second), world.news(third)]
    news[1] = msgspec.structs.replace(news[1], calls=1 << 63)
    taken = world.ledger.complete_many(news)
    assert [type(one) for one in taken] == [Ack, BadRequest, Ack]
    assert [world.task(lease.task.id) for lease in (first, second, third)] == ["done", "leased", "done"]
    world.check()


def test_numbers_that_no_sample_has_are_refused_and_harm_nobody(make_world):
    world = make_world()
    first, second = world.lease(2)
    assert world.done(first).accepted
    for wrong in ({"tokens": 1 << 62, "trained": 1 << 62}, {"newest": 1 << 63}):
        with pytest.raises(BadRequest, match="contradicts itself"):
            world.done(second, samples=[msgspec.structs.replace(sample(0), **wrong)])
    assert world.done(second).accepted
    world.check()
