"""Plans: the three modes are tags and nothing else, and a change of tags moves no more than it must."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.config import Recipe, load_recipe
from rillflow.errors import RunError
from rillflow.resources.placement import Placed, Plan, difference, maintainers, node_of, plan, planned, services
from rillflow.resources.workers import Worker, initial_workers

RECIPE = load_recipe("quickstart", ["trainer.ranks=2"])
TAG_SETS = st.frozensets(st.sampled_from(["rollout", "train"]))
WORKERS = st.lists(st.tuples(TAG_SETS, st.none() | st.floats(1, 9)), max_size=6).map(
    lambda kinds: [
        Worker(name=f"w{number}", tags=tags, policy="agent", tflops=tflops, bandwidth=tflops and 100.0)
        for number, (tags, tflops) in enumerate(kinds)
    ]
)


def first_plan(*overrides: str) -> Plan:
    recipe = load_recipe("quickstart", list(overrides))
    return plan(recipe, initial_workers(recipe))


ONE_WORD = {
    "asynchronous": (["rollout.nodes=2"], "[{tags: [train], count: 2}, {tags: [rollout], count: 2}]"),
    "colocated": (["runtime.mode=colocated"], "[{tags: [rollout, train], count: 2}]"),
    "multiplexed": (
        ["runtime.mode=multiplexed", "rollout.nodes=2"],
        "[{tags: [rollout], count: 2}, {tags: [train, rollout], count: 2}]",
    ),
}


@pytest.mark.parametrize("mode", ONE_WORD)
def test_one_word_and_explicit_tags_are_the_same_plan(mode: str) -> None:
    word, tags = ONE_WORD[mode]
    by_word = first_plan("trainer.ranks=2", *word)
    assert first_plan("trainer.ranks=2", f"resources.workers={tags}") == by_word
    (trainer,) = by_word.trainers
    assert trainer.options == ("--policy", "agent"), "nothing is said that the recipe says"
    assert trainer.playing == (() if mode == "asynchronous" else (0, 1))
    assert [node.name for node in by_word.nodes] == ([] if mode == "colocated" else ["rollout-0", "rollout-1"])


def test_what_the_recipe_does_not_say_is_in_the_arguments() -> None:
    workers = [
        Worker(name="trainer-agent", tags=frozenset({"train"}), policy="agent"),
        Worker(name="rollout-0", tags=frozenset({"rollout"}), policy="agent"),
    ]
    fewer = plan(RECIPE, workers)
    assert fewer.trainers[0].options == ("--policy", "agent", "--ranks", "1")
    multiplexed = load_recipe("quickstart", ["runtime.mode=multiplexed"])
    assert plan(multiplexed, workers).trainers[0].options == ("--policy", "agent", "--playing", "")
    some = first_plan("trainer.ranks=2", "resources.workers=[{tags: [train]}, {tags: [rollout, train]}]")
    assert some.trainers[0].options == ("--policy", "agent", "--playing", "1")
    assert some.trainers[0].arguments(Path("/r"))[:2] == ("trainer", "/r")


def test_who_is_too_many_plays_or_rests() -> None:
    found = first_plan(
        "resources.workers=[{tags: [train], count: 2}, {tags: [rollout, train], tflops: 9, bandwidth: 10}]"
    )
    assert found.trainers[0].workers == ("trainer-agent-rank2",), "the highest priority"
    assert found.trainers[0].playing == (0,)
    assert found.spares == ("trainer-agent-rank0", "trainer-agent-rank1")
    slow = first_plan(
        "resources.workers=[{tags: [train], tflops: 9, bandwidth: 9},{tags: [rollout, train], tflops: 1, bandwidth: 9}]"
    )
    (node,) = slow.nodes
    assert (node.name, node.workers) == ("rollout-trainer-agent-rank1", ("trainer-agent-rank1",))
    assert node.options == ("--name", node.name)


@pytest.mark.parametrize(
    ("workers", "match"),
    [("[{tags: [rollout]}]", "no worker can train agent"), ("[{tags: [train]}]", "no worker rolls out")],
)
def test_a_run_that_could_never_get_on_is_refused(workers: str, match: str) -> None:
    recipe = load_recipe("quickstart")
    kinds = load_recipe("quickstart", ["resources.workers=[{tags: [train]}, {tags: [rollout]}]"])
    tag = "rollout" if "rollout" in workers else "train"
    some = [worker for worker in initial_workers(kinds) if tag in worker.tags]
    with pytest.raises(RunError, match=match) as caught:
        plan(recipe, some)
    assert "rillflow tags" in caught.value.hint


def test_several_policies_have_no_trainers_that_play() -> None:
    one = load_recipe("quickstart")
    two = one.model_copy(update={"policies": {name: one.policies["agent"] for name in ("solver", "checker")}})
    workers = initial_workers(two)
    assert [trainer.workers for trainer in plan(two, workers).trainers] == [("trainer-solver",), ("trainer-checker",)]
    both = [msgspec.structs.replace(worker, tags=frozenset({"rollout", "train"})) for worker in workers]
    with pytest.raises(RunError, match="only in a run of one policy"):
        plan(two, both)


def made(recipe: Recipe, workers: list[Worker], current: Plan | None = None) -> Plan | None:
    try:
        return plan(recipe, workers, current)
    except RunError:
        return None


@given(WORKERS)
def test_every_worker_has_one_place(workers: list[Worker]) -> None:
    found = made(RECIPE, workers)
    if found is None:
        able = {tag for worker in workers for tag in worker.tags}
        assert able < {"rollout", "train"}, "only a tag that nobody has makes a plan impossible"
        return
    places = [name for process in found.processes.values() for name in process.workers] + list(found.spares)
    assert sorted(places) == sorted(worker.name for worker in workers)
    by_name = {worker.name: worker for worker in workers}
    (trainer,) = found.trainers
    able_to_train = [worker for worker in workers if "train" in worker.tags]
    assert trainer.ranks == min(2, len(able_to_train))
    for rank, name in enumerate(trainer.workers):
        assert "train" in by_name[name].tags
        assert (rank in trainer.playing) == ("rollout" in by_name[name].tags)
    assert {node.workers[0] for node in found.nodes} == {
        worker.name for worker in workers if "rollout" in worker.tags and worker.name not in trainer.workers
    }
    assert found.of_worker.keys() | set(found.spares) == by_name.keys()


@given(WORKERS, st.data())
def test_a_change_moves_nobody_else_who_trains(workers: list[Worker], data: st.DataObject) -> None:
    before = made(RECIPE, workers)
    if before is None:
        return
    victim = data.draw(st.sampled_from([worker.name for worker in workers]))
    tags = data.draw(TAG_SETS)
    changed = [msgspec.structs.replace(w, tags=tags) if w.name == victim else w for w in workers]
    after = made(RECIPE, changed, before)
    if after is None:
        return
    stayed = [name for name in before.trainers[0].workers if name != victim]
    assert [name for name in after.trainers[0].workers if name in stayed] == stayed
    noted = [
        msgspec.structs.replace(worker, process=process, rank=rank)
        for worker in workers
        for process, rank in [before.of_worker.get(worker.name, ("", None))]
    ]
    assert made(RECIPE, noted, planned(RECIPE, noted)) == before, "what is written down is enough to plan as before"


@given(WORKERS, WORKERS)
def test_the_difference_leads_from_one_plan_to_the_other(old: list[Worker], new: list[Worker]) -> None:
    before, after = made(RECIPE, old), made(RECIPE, new)
    if before is None or after is None:
        return
    running = dict(before.processes)
    due = difference(running, after)
    for process in due.retire:
        assert process.role == "rollout", "a policy always has its trainer"
        del running[process.name]
    for was, now in due.restart:
        assert running[was.name] == was
        assert was.role == "trainer", "nodes come and go; none is changed"
        running[was.name] = now
    for process in due.start:
        assert process.name not in running
        running[process.name] = process
    assert running == after.processes
    assert difference(running, after) == ([], [], [])


def test_who_is_lost_has_no_place() -> None:
    recipe = load_recipe("quickstart", ["rollout.nodes=2"])
    workers = [msgspec.structs.replace(w, lost=w.name == "rollout-0") for w in initial_workers(recipe)]
    found = plan(recipe, workers)
    assert [node.name for node in found.nodes] == ["rollout-1"]
    assert found.spares == ()


def test_a_node_never_has_a_trainers_name() -> None:
    assert node_of("rollout-3") == "rollout-3"
    assert node_of("trainer-agent-rank0") == "rollout-trainer-agent-rank0"


def test_services_are_what_the_recipe_asks_for() -> None:
    recipe = load_recipe("quickstart", ["dataflow.units.count=2", "rollout.engines=1", "runtime.weights_server=true"])
    assert [process.name for process in services(recipe)] == ["unit-0", "unit-1", "weights", "engine-0"]
    assert maintainers(recipe) == []
    scaled = load_recipe("quickstart", ["resources.scaling.enabled=true"])
    assert maintainers(scaled) == [Placed("maintainer", "maintain")]


def test_every_worker_of_a_stage_is_a_process() -> None:
    recipe = load_recipe("quickstart", ["policies.agent.stages={ref: {kind: reference, workers: 2}}"])
    stages = [process for process in services(recipe) if process.role == "stage"]
    assert [process.name for process in stages] == ["stage-agent-ref-0", "stage-agent-ref-1"]
    words = ("stage", "RUN", "ref", "--policy", "agent", "--name", "stage-agent-ref-1")
    assert stages[1].arguments(Path("RUN")) == words
