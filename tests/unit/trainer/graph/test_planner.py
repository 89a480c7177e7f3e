"""Plans: the order of nodes, refusals, and orders of random graphs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from graph_helpers import stub, stubs
from hypothesis import given
from hypothesis import strategies as st

from rillflow.config import NodeConfig
from rillflow.errors import ConfigError, GraphError
from rillflow.trainer.graph import function
from rillflow.trainer.graph.nodes import Definition, Node
from rillflow.trainer.graph.planner import Chain, agree, ordered, plan
from rillflow.trainer.parallel import Alone

GRPO = ["fetch", "advantages", "train_actor", "publish"]
PPO = ["fetch", "critic_values", "gae", "train_critic", "train_actor", "publish"]


def ids(*definitions: Definition, ranks: int = 1) -> list[str]:
    return [node.id for node in plan(definitions, stubs(), ranks=ranks).nodes]


def node(function: str | None = None, **settings: Any) -> NodeConfig:
    return NodeConfig(function=function, **settings)


def refused(*definitions: Definition, ranks: int = 1) -> str:
    with pytest.raises(GraphError) as caught:
        plan(definitions, stubs(), ranks=ranks)
    assert caught.value.hint
    return f"{caught.value.message}\n{caught.value.hint}"


# ---------------------------------------------------------------- where nodes go


def test_columns_alone_give_the_order() -> None:
    assert ids(*reversed(PPO)) == ["fetch", "critic_values", "gae", "train_actor", "train_critic", "publish"]
    assert ids(*PPO) == PPO


def test_what_is_optional_is_waited_for_where_somebody_makes_it() -> None:
    kl = ["fetch", "advantages", "train_actor", "publish", "reference_logprobs", "kl_reward"]
    assert ids(*kl) == ["fetch", "reference_logprobs", "kl_reward", "advantages", "train_actor", "publish"]


def shorter() -> Node:
    return Node("shorter", stub("shorter", "reward", "compute", "reward_R length_R", "reward_R"))


def test_a_node_that_makes_a_column_anew_goes_between_maker_and_readers() -> None:
    assert ids(*GRPO, shorter()) == ["fetch", "shorter", "advantages", "train_actor", "publish"]


def test_several_that_make_it_anew_go_in_the_order_given() -> None:
    last = Node("last", stub("last", "reward", "compute", "", "reward_R"))
    assert ids(*GRPO, "punish_overlong", shorter(), last)[1:5] == ["punish_overlong", "shorter", "last", "advantages"]
    assert ids(*GRPO, last, shorter(), "punish_overlong")[1:5] == ["last", "shorter", "punish_overlong", "advantages"]


def test_advantages_can_be_made_anew() -> None:
    clipped = Node("clipped", stub("clipped", "actor", "compute", "advantage_N", "advantage_N"))
    chain = plan([*GRPO, clipped], stubs())
    assert [each.id for each in chain.nodes] == ["fetch", "advantages", "clipped", "train_actor", "publish"]
    assert ("clipped", "train_actor", ("advantage_N",)) in [(e.before, e.after, e.columns) for e in chain.edges]
    assert ("advantages", "train_actor", ()) in [(e.before, e.after, e.columns) for e in chain.edges]


def test_training_comes_after_all_that_makes_columns() -> None:
    hardness = Node("hardness", stub("hardness", "reward", "compute", "length_R", "hardness_N"))
    assert ids(*PPO, hardness)[-3:] == ["train_critic", "train_actor", "publish"]


def test_a_node_may_ask_to_come_after_training() -> None:
    late = node("critic_values", id="late", needs=["train_critic"])
    again = Node("again", stub("again", "critic", "compute", "value_N", "advantage_N"), needs=("late",))
    order = ids(
        "fetch",
        "critic_values",
        node("gae", needs=["critic_values"]),
        node("train_critic", needs=["gae"]),
        late,
        again,
        node("train_actor", needs=["again"]),
        "publish",
    )
    assert order == ["fetch", "critic_values", "gae", "train_critic", "late", "again", "train_actor", "publish"]


def test_needs_win_over_columns() -> None:
    first = node("advantages", needs=["fetch"])
    assert ids("fetch", "punish_overlong", first, "train_actor", "publish")[1:3] == ["punish_overlong", "advantages"]
    free = Node("shorter", shorter().function, needs=("advantages",))
    assert ids("fetch", first, "train_actor", "publish", free)[1:3] == ["advantages", "shorter"]


def test_role_and_kind_stand_for_a_function() -> None:
    written = [
        node(role="actor", kind="generate"),
        node(role="actor", kind="compute", id="advantage"),
        node(role="actor", kind="train"),
        node(role="actor", kind="publish"),
    ]
    assert ids(*written) == ["generate", "advantage", "train_actor", "publish"]


def test_functions_by_place_and_in_python(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from rillflow.trainer.graph import function\n"
        "@function('shorter', role='reward', kind='compute', needs=['reward_R'], gives=['reward_R'])\n"
        "def shorter(step, data, factor=0.1):\n    return {}\n"
        "def plain(step, data):\n    return {}\n"
    )

    @function("longer", role="reward", kind="compute", needs=["reward_R"], gives=["reward_R"])
    def longer(step: Any, data: Any) -> Any: ...

    chain = [*GRPO, node(f"{file}:shorter", options={"factor": 0.2}), longer]
    assert ids(*chain) == ["fetch", "shorter", "longer", "advantages", "train_actor", "publish"]
    assert "@function" in refused(*GRPO, f"{file}:plain")
    with pytest.raises(ConfigError, match="did you mean 'shorter'"):
        plan([*GRPO, f"{file}:shorted"], stubs())


# ---------------------------------------------------------------- what is refused


def test_the_same_id_twice() -> None:
    text = refused(*GRPO, "advantages")
    assert "two nodes have the id 'advantages'" in text
    assert "train_actor  actor train" in text  # the graph is shown


def test_a_cycle_is_named() -> None:
    odd = Node("odd", stub("odd", "reward", "compute", "advantage_N", "reward_R"))
    assert "advantages -> odd -> advantages" in refused(*GRPO, odd)
    assert "a -> a" in refused(*GRPO, Node("a", shorter().function, needs=("a",)))


def test_unknown_names() -> None:
    assert "did you mean 'advantages'" in refused("fetch", "advantage", "train_actor", "publish")
    assert "did you mean 'advantages'" in refused("fetch", "advantages", node("train_actor", needs=["advantage"]),
                                                  "publish")  # fmt: skip
    assert "reward infer has no default function" in refused(*GRPO, node(role="reward", kind="infer"))
    assert "its function advantages has actor" in refused(*GRPO, node("advantages", id="b", role="critic"))
    odd: Any = stub("odd", "teacher", "compute")  # type: ignore[arg-type]
    assert "unknown role 'teacher'" in refused(*GRPO, Node("odd", odd))
    odd = stub("odd", "actor", "trian")  # type: ignore[arg-type]
    assert "did you mean 'train'" in refused(*GRPO, Node("odd", odd))


def test_a_missing_column_says_who_could_make_it() -> None:
    text = refused("fetch", "kl_reward", "advantages", "train_actor", "publish")
    assert "node kl_reward reads reference_N, which no node before it makes" in text
    assert "reference_logprobs (reference infer)" in text
    own = Node("own", stub("own", "reward", "compute", "hardnes_N", "x_N"))
    assert 'gives=["hardnes_N"]' in refused(*GRPO, own)
    early = node("advantages", needs=[])
    assert "before gae makes it" in refused(
        "fetch", "critic_values", node("train_critic", needs=["critic_values"]),
        node("gae", needs=["train_critic"]), "train_actor", "publish")  # fmt: skip
    assert ids("fetch", early, "train_actor", "publish")[1] == "advantages"


def test_columns_say_what_they_are_of() -> None:
    assert "_R (rows)" in refused(*GRPO, Node("x", stub("x", "reward", "compute", "", "hardness")))
    assert "infer or compute make columns" in refused(*GRPO, Node("x", stub("x", "actor", "train", "", "hardness_N")))
    assert "by mask_N instead" in refused(*GRPO, Node("x", stub("x", "reward", "compute", "", "length_R")))


def test_options_are_those_of_the_function() -> None:
    @function("scaled", role="reward", kind="compute", needs=["reward_R"], gives=["reward_R"])
    def scaled(step: Any, data: Any, *, factor: float) -> Any: ...

    @function("lacking", role="reward", kind="compute", gives=["reward_R"])
    def lacking(data: Any) -> Any: ...

    assert "it takes no options" in refused(node("fetch", options={"x": 1}), *GRPO[1:])
    assert "needs the option 'factor'" in refused(*GRPO, scaled)
    assert "begin it with (step, data)" in refused(*GRPO, lacking)


def test_sources_training_and_publishing() -> None:
    assert "no source" in refused(*GRPO[1:])
    assert "2 sources (fetch, generate)" in refused(*GRPO, "generate")
    assert "must come first" in refused(node("fetch", needs=["advantages"]), *GRPO[1:])
    assert "trains nothing" in refused("fetch", "advantages", "publish")
    assert "no publish node" in refused(*GRPO[:-1])
    assert "2 publish nodes" in refused(*GRPO, node("publish", id="again"))
    assert "must come last" in refused("fetch", "advantages", node("train_actor", needs=["publish"]), "publish")


def test_ranks_are_those_there_are() -> None:
    assert ids("fetch", node("advantages", ranks=2), "train_actor", "publish", ranks=4)[1] == "advantages"
    assert "wants its data on 2 ranks" in refused(*GRPO[:1], node("advantages", ranks=2), *GRPO[2:])
    assert "cannot have `ranks`" in refused(node("fetch", ranks=1), *GRPO[1:])


# ---------------------------------------------------------------- all ranks alike


class Two(Alone):
    """Rank 0 beside a rank that says something else, or the same."""

    size = 2

    def __init__(self, other: bytes | None) -> None:
        self._other = other

    def everyone(self, message: bytes) -> list[bytes]:
        return [message, self._other or message]


def test_ranks_with_other_graphs_are_named() -> None:
    chain, other = plan(GRPO, stubs()), plan([*GRPO, shorter()], stubs())
    agree(chain, Two(None))
    with pytest.raises(GraphError, match="step graph of ranks 1 differs"):
        agree(chain, Two(other.digest.encode()))


def test_options_and_ranks_are_part_of_what_is_compared() -> None:
    def of(**settings: Any) -> Chain:
        return plan(["fetch", node("advantages", **settings), "train_actor", "publish"], stubs(), ranks=2)

    assert of().digest == of().digest
    assert of().digest != of(ranks=2).digest
    assert of().digest != of(id="other").digest


# ---------------------------------------------------------------- orders of random graphs

names = st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=12, unique=True)


@st.composite
def dags(draw: st.DrawFn) -> tuple[list[str], list[tuple[str, str]]]:
    """Names in an order that all edges respect, and the edges."""
    order = draw(names)
    pairs = [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]
    return order, draw(st.lists(st.sampled_from(pairs), max_size=30)) if pairs else []


@given(dags(), st.randoms())
def test_every_edge_is_respected_and_the_order_is_one(dag: Any, random: Any) -> None:
    hidden, edges = dag
    shuffled = list(hidden)
    random.shuffle(shuffled)
    places = {name: place for place, name in enumerate(shuffled)}
    order = ordered(places, edges)
    assert sorted(order) == sorted(hidden)
    at = {name: place for place, name in enumerate(order)}
    assert all(at[before] < at[after] for before, after in edges)
    random.shuffle(edges)
    assert ordered({name: places[name] for name in sorted(places)}, edges) == order


@given(dags(), st.randoms())
def test_where_names_fix_the_ties_the_order_of_definition_changes_nothing(dag: Any, random: Any) -> None:
    names, edges = dag
    order = ordered(dict.fromkeys(names, 0), edges)
    random.shuffle(names)
    random.shuffle(edges)
    assert ordered(dict.fromkeys(names, 0), edges) == order


@given(dags(), st.data())
def test_every_cycle_is_found(dag: Any, data: st.DataObject) -> None:
    names, edges = dag
    circle = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=6, unique=True))
    edges = [*edges, *zip(circle, [*circle[1:], circle[0]], strict=True)]
    with pytest.raises(GraphError, match="cycle: ") as caught:
        ordered(dict.fromkeys(names, 0), edges)
    named = caught.value.message.partition("cycle: ")[2].split(" -> ")
    assert named[0] == named[-1] == min(named)
    assert all(pair in edges for pair in pairwise(named))
