"""Context parallel: teams of ranks share micro-batches, and count them once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_helpers import CPU, branching, grouped_model
from pydantic import ValidationError
from thread_peers import ThreadPeers, in_ranks
from trainer_helpers import random_rows, small_critic, small_model

from commands import Warm
from forked_ranks import run_ranks
from model_families import build
from rillflow.config import NodeConfig, TrainerConfig
from rillflow.errors import ConfigError, GraphError, LeaseLost
from rillflow.trainer.attention.paths import tables
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.graph.builtin import builtin, chain_of
from rillflow.trainer.packing import micro_batches
from rillflow.trainer.parallel import Alone
from rillflow.trainer.parallel.context import Context, Teams, in_teams
from soak import repetitions

RANK = Path(__file__).with_name("context_rank.py")


def test_a_team_of_two_computes_what_one_rank_does(warm: Warm, tmp_path: Path) -> None:
    run_ranks(RANK, 2, tmp_path, "2", "short", warm=warm)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "size"), repetitions([(4, 2)], [(2, 2), (4, 2), (4, 4)]))
def test_steps_of_teams_are_those_of_one_rank(warm: Warm, tmp_path: Path, ranks: int, size: int) -> None:
    run_ranks(RANK, ranks, tmp_path, str(size), "long", warm=warm)


# ---------------------------------------------------------------- teams as peers


def test_a_team_counts_once_and_all_its_ranks_hear_the_answers() -> None:
    def work(ranks: ThreadPeers) -> dict[str, Any]:
        teams = in_teams(ranks, TrainerConfig(ranks=6, context_ranks=2))
        added = torch.full((2,), 1.0 + teams.rank)
        teams.add([added])
        return {
            "place": (teams.rank, teams.size),
            "total": teams.total([1.0, float(teams.rank)]),
            "highest": teams.highest([float(teams.rank)]),
            "first": teams.first(b"%d" % teams.rank),
            "everyone": teams.everyone(b"team %d" % teams.rank),
            "exchange": teams.exchange([b"%d to %d" % (teams.rank, other) for other in range(teams.size)]),
            "add": added.tolist(),
        }

    for rank, heard in enumerate(in_ranks(6, work)):
        team = rank // 2
        assert heard == {
            "place": (team, 3),
            "total": [3.0, 3.0],
            "highest": [2.0],
            "first": b"0",
            "everyone": [b"team 0", b"team 1", b"team 2"],
            "exchange": [b"%d to %d" % (other, team) for other in range(3)],
            "add": [6.0, 6.0],
        }


def test_an_error_of_one_rank_reaches_all_teams() -> None:
    def work(ranks: ThreadPeers) -> None:
        with pytest.raises(LeaseLost):
            Teams(ranks, 2).agree(LeaseLost("gone") if ranks.rank == 3 else None)

    in_ranks(4, work)


def test_without_context_parallel_ranks_are_their_own_teams() -> None:
    alone = Alone()
    assert in_teams(alone, TrainerConfig()) is alone
    assert in_teams(alone, TrainerConfig(ranks=2, context_ranks=2)) is alone  # a stage, which has one rank


# ---------------------------------------------------------------- shares of a micro-batch


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_token_has_one_rank_and_filling_changes_no_segment_but_the_last(size: int) -> None:
    rows = branching(1)
    for make in micro_batches(Databuffer(rows), [], 97, device=CPU, trees=True):
        micro = make()
        layout, tokens = micro.layout, len(micro.layout.tokens_P)
        whole = Context(0, size).padded(layout)
        assert len(whole.tokens_P) == -(-tokens // size) * size == whole.length_S.sum()
        assert np.array_equal(whole.length_S[:-1], layout.length_S[:-1])
        assert torch.equal(whole.tokens_P[:tokens], layout.tokens_P)
        assert not whole.position_P[tokens:].any()
        tables(whole)
        shares = [Context(rank, size).own(whole.tokens_P) for rank in range(size)]
        assert torch.equal(torch.stack(shares, 1).flatten(), whole.tokens_P)
        own = [Context(rank, size).trained(micro) for rank in range(size)]
        assert sum(len(each.target_I) for each in own) == len(micro.target_T)
        for rank, each in enumerate(own):
            read = shares[rank][each.select_I]
            mine = micro.select_T[micro.select_T % size == rank]
            assert torch.equal(read, layout.tokens_P[mine])


def test_unknown_experts_fill_the_last_tokens() -> None:
    micro = micro_batches(Databuffer(random_rows(0)), [], 64, device=CPU)[0]()
    layout = replace(micro.layout, experts_PW=torch.ones(len(micro.layout.tokens_P), 4, dtype=torch.int64))
    size = len(layout.tokens_P) - 1
    last = Context(size - 1, size).experts(layout)
    assert last is not None
    assert last.tolist() == [[1] * 4, [-1] * 4]
    assert Context(0, size).experts(micro.layout) is None


def test_one_rank_takes_micro_batches_as_they_are() -> None:
    micro = micro_batches(Databuffer(random_rows(0)), [], 64, device=CPU)[0]()
    alone = Context.of(TrainerConfig(), Alone())
    own = alone.trained(micro)
    assert own.select_I is micro.select_T
    assert own.gather(own.target_I) is own.target_I
    assert alone.padded(micro.layout) is micro.layout
    assert alone.exchanging(abs) is abs  # type: ignore[arg-type, comparison-overlap]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"context_ranks": 2}, r"ranks \(1\) must be a multiple of context_ranks \(2\)"),
        ({"ranks": 4, "context_ranks": 3}, r"ranks \(4\) must be a multiple of context_ranks \(3\)"),
        ({"ranks": 2, "context_ranks": 2, "attention": "padded"}, "context_ranks shares packed rows"),
        ({"ranks": 2, "context_ranks": 2, "backend": "accelerate"}, "accelerate has no ranks, context_ranks"),
    ],
)
def test_what_cannot_share_micro_batches_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainerConfig(**settings)


def test_ranks_that_cannot_form_teams_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 ranks cannot form teams of 2"):
        Context.of(TrainerConfig(ranks=2, context_ranks=2), Alone())


@pytest.mark.parametrize(
    ("forward", "model", "said"),
    [
        (
            PolicyForward,
            lambda: grouped_model(dtype=torch.float32),
            "3 ranks cannot share the attention heads of Qwen3ForCausalLM: num_attention_heads is 4",
        ),
        (
            ScalarForward,
            small_critic,
            "cannot share the attention heads of Qwen3ForSequenceClassification: num_attention_heads is 2",
        ),
        (PolicyForward, lambda: build("Mamba 2"), "ranks cannot share padded rows: Mamba2Model"),
        (PolicyForward, lambda: build("Nemotron"), "ranks cannot share padded rows: NemotronModel does not pass"),
    ],
)
def test_models_whose_heads_or_rows_cannot_be_shared_are_refused(forward: Any, model: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        forward(model(), TrainerConfig(ranks=3, context_ranks=3), context=Context(0, 3))


def test_other_models_are_not_asked_for_their_heads() -> None:
    PolicyForward(small_model().to(torch.bfloat16), TrainerConfig(ranks=3, context_ranks=3, dtype="bf16"))


def test_a_node_has_at_most_as_many_holders_as_there_are_teams() -> None:
    nodes = [
        *builtin(TrainerConfig())[:-2],
        NodeConfig(function="train_actor", ranks=3),
        NodeConfig(function="publish"),
    ]
    with pytest.raises(GraphError, match="wants its data on 3 ranks, but the trainer has 2"):
        chain_of(TrainerConfig(ranks=4, context_ranks=2, graph=nodes))
    assert chain_of(TrainerConfig(ranks=6, context_ranks=2, graph=nodes)).nodes[-2].ranks == 3
