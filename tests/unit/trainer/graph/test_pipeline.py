"""A chain at work: its columns, its checks, abandoned steps, and the time of each node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from trainer_helpers import in_parts, random_rows

from peer_threads import as_peers
from rillflow.config import NodeConfig, TrainerConfig
from rillflow.errors import GraphError
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.batches import Databuffer, Rows, no_rows
from rillflow.trainer.graph.nodes import Definition, Function, Kind, Node, Scope
from rillflow.trainer.graph.planner import plan
from rillflow.trainer.graph.worker import Pipeline, Step
from rillflow.trainer.parallel import Alone, Peers


class Ticking:
    """A second passes with every look at it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        self.seconds += 1.0
        return self.seconds


def step_of(parts: list[Rows], peers: Peers | None = None, check: Callable[[], None] = lambda: None) -> Step:
    config = TrainerConfig()

    def rows() -> Iterator[Databuffer]:
        return map(Databuffer, parts)

    return Step(
        number=0,
        config=config,
        algorithm=ALGORITHMS["grpo"](config),
        models={},
        peers=peers or Alone(),
        fetch=rows,
        generate=rows,
        publish=lambda: None,
        check=check,
    )


def node(
    name: str,
    kind: Kind,
    run: Callable[..., Any],
    needs: str = "",
    gives: str = "",
    *,
    scope: Scope = "part",
    **more: Any,
) -> Node:
    return Node(name, Function(name, "reward", kind, run, tuple(needs.split()), tuple(gives.split()), scope), **more)


def fetch() -> Node:
    return node("fetch", "fetch", lambda step: step.fetch())


def publish() -> Node:
    return node("publish", "publish", lambda step: step.publish())


def train(seen: list[Any], name: str = "train", **more: Any) -> Node:
    """Keeps what has come by, one entry a part."""

    def run(step: Step, parts: Iterator[Databuffer]) -> Mapping[str, float]:
        for part in parts:
            step.check()
            seen.append(part)
        return {name: float(len(seen))}

    return node(name, "train", run, **more)


def run(step: Step, *nodes: Definition) -> dict[str, float]:
    return Pipeline(plan(nodes, ranks=step.peers.size), step, Ticking()).run()


def test_parts_flow_one_after_the_other() -> None:
    events: list[str] = []

    def note(what: str) -> Callable[..., Any]:
        def made(step: Step, data: Databuffer) -> Any:
            events.append(what)
            return {f"{what}_R": np.arange(len(data))}

        return made

    def trains(step: Step, parts: Iterator[Databuffer]) -> Any:
        for part in parts:
            events.append("train")
            assert "a_R" in part
            assert "b_R" in part

    chain = [
        fetch(),
        node("a", "compute", note("a"), gives="a_R"),
        node("b", "compute", note("b"), "a_R", "b_R"),
        node("train", "train", trains),
        publish(),
    ]
    run(step_of(in_parts(0, (4, 8))), *chain)
    assert events == ["a", "b", "train"] * 2


def test_who_needs_the_batch_gets_all_of_it_once() -> None:
    sizes: list[int] = []

    def whole(step: Step, data: Databuffer) -> Any:
        sizes.append(len(data))
        return {"x_N": np.zeros(len(data["tokens_N"]))}

    seen: list[Databuffer] = []
    run(
        step_of(in_parts(0, (4, 8))), fetch(), node("x", "compute", whole, gives="x_N", scope="batch"), train(seen),
        publish(),
    )  # fmt: skip
    assert sizes == [12]
    assert [len(part) for part in seen] == [12]
    assert np.array_equal(seen[0]["reward_R"], random_rows(0).reward_R)


def test_a_second_train_node_sees_the_same_parts() -> None:
    first: list[Databuffer] = []
    second: list[Databuffer] = []
    metrics = run(step_of(in_parts(0, (4, 8))), fetch(), train(first, "one"), train(second, "two"), publish())
    assert first == second
    assert [len(part) for part in first] == [4, 8]
    assert metrics["one"] == metrics["two"] == 2.0


def test_a_column_made_anew_keeps_its_type() -> None:
    seen: list[Databuffer] = []
    halved = node(
        "halved", "compute", lambda step, data: {"reward_R": data["reward_R"].astype("f4") / 2}, "reward_R", "reward_R"
    )
    run(step_of([random_rows(0)]), fetch(), halved, train(seen), publish())
    assert seen[0].rows.reward_R.dtype == np.float64
    assert seen[0].rows.reward_R == pytest.approx(random_rows(0).reward_R / 2)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({}, "node x returned nothing, its function declares x_N"),
        (None, "node x returned NoneType"),
        ({"y_N": [1.0]}, "node x returned y_N"),
        ({"x_N": np.zeros(3), "y_N": np.zeros(3)}, "node x returned x_N, y_N"),
        ({"x_N": np.zeros(3)}, "node x: column x_N has shape (3,)"),
        ({"x_N": np.full(1000, np.nan)}, "node x made x_N with 1000 values that are not finite"),
        ({"x_N": np.full(1000, "easy")}, "node x made x_N of <U4"),
        ({"x_N": np.full(1000, None)}, "node x made x_N of object"),
    ],
)
def test_what_a_node_makes_is_checked(made: Any, message: str) -> None:
    bad = node("x", "compute", lambda step, data: made, gives="x_N")
    with pytest.raises(GraphError) as caught:
        run(step_of([random_rows(0)]), fetch(), bad, train([]), publish())
    assert message in caught.value.message
    assert caught.value.hint


def test_the_first_token_of_a_row_cannot_be_trained() -> None:
    """Nothing comes before it that could be asked for it."""
    every = node("x", "compute", lambda step, data: {"mask_N": np.ones(len(data["mask_N"]))}, gives="mask_N")
    with pytest.raises(GraphError, match="trains the first token of 12 rows"):
        run(step_of([random_rows(0)]), fetch(), every, train([]), publish())


def test_where_no_answer_ends_there_is_no_reward_of_one() -> None:
    seen: list[Databuffer] = []

    def judged(step: Step, data: Databuffer) -> Any:
        reward_N = np.full(len(data["mask_N"]), np.nan)
        reward_N[3] = 0.5
        return {"step_reward_N": reward_N}

    run(step_of([random_rows(0)]), fetch(), node("x", "infer", judged, gives="step_reward_N"), train(seen), publish())
    assert np.flatnonzero(~np.isnan(seen[0]["step_reward_N"])).tolist() == [3]
    endless = node(
        "x", "infer", lambda step, data: {"step_reward_N": np.full(len(data["mask_N"]), np.inf)}, gives="step_reward_N"
    )
    with pytest.raises(GraphError, match="not finite"):
        run(step_of([random_rows(0)]), fetch(), endless, train([]), publish())


def test_an_error_says_in_which_node_it_came_up() -> None:
    def fails(step: Step, data: Databuffer) -> Any:
        raise KeyError("hardness")

    with pytest.raises(KeyError) as caught:
        run(step_of([random_rows(0)]), fetch(), node("x", "compute", fails, gives="x_N"), train([]), publish())
    assert caught.value.__notes__ == ["in node x of the step graph"]


def test_a_source_gives_something() -> None:
    with pytest.raises(GraphError, match="fetch gave no data"):
        run(step_of([]), fetch(), train([]), publish())


def test_after_the_first_training_nothing_is_asked_any_more() -> None:
    asked = []
    step = step_of(in_parts(0, (4, 8)), check=lambda: asked.append(1))
    run(step, fetch(), train([], "one"), train([], "two"), publish())
    assert len(asked) == 2


def test_seconds_are_the_nodes_own() -> None:
    metrics = run(step_of(in_parts(0, (4, 8))), fetch(), train([], "train-it"), publish())
    # A tick each: fetch is called and asked three times for a part; training is what lies before, between and after.
    assert metrics == {
        "node_fetch_seconds": 4.0,
        "node_train_it_seconds": 5.0,
        "node_publish_seconds": 1.0,
        "train-it": 2.0,
    }


def test_options_reach_the_function() -> None:
    seen: list[Databuffer] = []

    def scaled(step: Step, data: Databuffer, factor: float) -> Any:
        return {"reward_R": data["reward_R"] * factor}

    twice = node("scaled", "compute", scaled, "reward_R", "reward_R", options={"factor": 2.0})
    run(step_of([random_rows(0)]), fetch(), twice, train(seen), publish())
    assert seen[0]["reward_R"] == pytest.approx(2 * random_rows(0).reward_R)


def test_data_move_to_the_ranks_that_a_node_wants_and_back() -> None:
    """Rank 1 of 2 has all rows; `counted` runs on one rank."""
    rows = random_rows(0)
    counts: dict[int, int] = {}

    def counted(step: Step, data: Databuffer) -> Any:
        counts[step.peers.rank] = len(data)
        return {"count_R": np.full(len(data), step.peers.rank)}

    def work(peers: Peers) -> list[Databuffer]:
        seen: list[Databuffer] = []
        step = step_of([rows] if peers.rank else [no_rows()], peers)
        one = node("counted", "compute", counted, gives="count_R", ranks=1)
        run(step, fetch(), one, train(seen), publish())
        return seen

    first, second = as_peers(2, work)
    assert counts == {0: 12, 1: 0}
    assert np.array_equal(np.concatenate([first[0]["reward_R"], second[0]["reward_R"]]), rows.reward_R)
    assert first[0]["count_R"].tolist() + second[0]["count_R"].tolist() == [0] * 12
    assert min(len(first[0]), len(second[0])) > 0


def test_definitions_of_a_recipe_run_as_they_are() -> None:
    config = NodeConfig(function=f"{__file__}:nothing_to_see")
    with pytest.raises(GraphError, match="does not declare the columns"):
        plan([fetch(), config, train([]), publish()])


def nothing_to_see(step: Step, data: Databuffer) -> Any: ...
