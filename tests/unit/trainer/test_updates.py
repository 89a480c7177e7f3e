"""Several updates a batch, and several ranks: neither changes what a batch means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from trainer_helpers import learner, random_rows, small_model
from written_out import SETTINGS

from peer_threads import as_peers
from rillflow.config import TrainerConfig
from rillflow.trainer.batches import Databuffer, Rows, no_rows
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.learner import Learner
from rillflow.trainer.parallel import Alone, Peers

FEW = {"batch_groups": 3, "micro_tokens": 40}


def taking(rows: Rows, keep_R: np.ndarray) -> Rows:
    return Databuffer(rows).taking(np.flatnonzero(keep_R)).rows


def close(one: Worker, other: Worker) -> None:
    mine, theirs = one.masters(), other.masters()
    assert set(mine) == set(theirs)
    for name in mine:  # gradients that were added up in another order are about 1e-6 off in fp32, updates a little more
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=2e-5)


def test_each_mini_batch_is_an_update_of_its_own() -> None:
    """Two groups and one, drawn by the seed: as if they were batches that follow each other."""
    rows = random_rows(3)
    split = learner(updates=2, seed=5, **FEW)
    metrics = split.step([rows])
    apart = learner(**FEW)
    place_R = np.random.default_rng((5, 0, 0)).permutation(3)[rows.member_R]
    for keep_R in (place_R < 2, place_R == 2):
        apart.step([taking(rows, keep_R)])
    close(split, apart)
    assert metrics["updates"] == 2
    assert metrics["trained_tokens"] == rows.mask_N.sum()
    assert split.steps == 1


def test_mini_batches_are_drawn_anew_in_every_step_and_epoch_by_the_seed() -> None:
    def drawn(seed: int, number: int) -> list[tuple[int, ...]]:
        """The groups of each update."""
        config = TrainerConfig(updates=4, epochs=3, batch_groups=8)
        actor = Learner("actor", torch.nn.Linear(1, 1), lambda _: None, None, config, Alone())  # type: ignore[arg-type]
        rows = Databuffer(random_rows(5, groups=8))
        return [tuple(sorted({*part["member_R"]})) for (part,) in actor._updates([rows], (seed, number))]

    first = drawn(1, 0)
    assert first == drawn(1, 0)
    assert len({tuple(first[at : at + 4]) for at in (0, 4, 8)}) == 3
    assert all(sorted(sum(first[at : at + 4], ())) == list(range(8)) for at in (0, 4, 8))
    assert first != drawn(1, 1)
    assert first != drawn(2, 0)


def test_epochs_pass_over_the_batch_again() -> None:
    rows = random_rows(3)
    twice = learner(epochs=2, **FEW)
    metrics = twice.step([rows])
    apart = learner(**FEW)
    apart.step([rows])
    apart.step([rows])
    close(twice, apart)
    assert metrics["updates"] == 2
    assert metrics["trained_tokens"] == rows.mask_N.sum()


def test_parts_and_order_do_not_matter_to_mini_batches() -> None:
    rows = random_rows(4)
    one, other = learner(updates=3, **FEW), learner(updates=3, **FEW)
    one.step([rows])
    turned = Databuffer(rows).taking(np.arange(len(rows.length_R))[::-1].copy()).rows
    other.step([taking(turned, turned.member_R != 1), taking(turned, turned.member_R == 1)])
    close(one, other)


@pytest.mark.parametrize("variant", ["clip", "mask"])
def test_a_mini_batch_that_trains_nothing_is_skipped(variant: str) -> None:
    rows = random_rows(3)
    rows = replace(rows, truncated_R=rows.member_R == 2)
    trained = learner(updates=3, overlong_filter=True, algorithm="m2po", m2_variant=variant, **FEW)
    metrics = trained.step([rows])
    assert (metrics["updates"], metrics["skipped"]) == (3, 1)
    assert metrics["m2"] > 0


class Enough(Exception):
    """An exception that ends the step."""


def test_after_the_first_update_a_step_is_finished() -> None:
    """No check follows, so no exception can leave a batch half trained."""
    asked = []
    rows = random_rows(3)
    plain = learner(**FEW)
    plain.step([rows], lambda: asked.append("once"))
    alone = len(asked)
    learner(epochs=3, **FEW).step([rows], lambda: asked.append("again"))
    assert len(asked) == 2 * alone
    untouched = learner(epochs=3, **FEW)
    before = {name: tensor.clone() for name, tensor in untouched.masters().items()}
    left = iter([None] * (alone - 1))

    def check() -> None:
        if next(left, Enough) is Enough:
            raise Enough

    with pytest.raises(Enough):
        untouched.step([rows], check)
    assert all(torch.equal(before[name], tensor) for name, tensor in untouched.masters().items())


def test_decoupled_ppo_clips_around_the_weights_before_the_first_update() -> None:
    rows = random_rows(3)
    settings: dict[str, Any] = {"algorithm": "decoupled_ppo", "lr": 0.05, "epochs": 4, **FEW}
    free = learner(clip_low=100.0, clip_high=100.0, **settings).step([rows])
    held = learner(clip_low=1e-3, clip_high=1e-3, **settings).step([rows])
    assert held["clip_low"] + held["clip_high"] > free["clip_low"] + free["clip_high"]


# ---------------------------------------------------------------- ranks


def shares(rows: Rows, ranks: int) -> list[Rows]:
    """Rows of a group are on several ranks; where there are many ranks, the last has none."""
    rank_R = np.arange(len(rows.length_R)) % (ranks - 1 if ranks > 3 else ranks)
    return [taking(rows, rank_R == rank) if (rank_R == rank).any() else no_rows() for rank in range(ranks)]


def trained(make: Callable[[Peers], Worker], rows: list[Rows], ranks: int) -> tuple[list[dict[str, float]], Worker]:
    """Metrics of each batch, the same on every rank, and the first rank's worker."""

    def run(peers: Peers) -> tuple[list[dict[str, float]], Worker]:
        worker = make(peers)
        return [worker.step([shares(batch, ranks)[peers.rank]]) for batch in rows], worker

    everyones = as_peers(ranks, run, seconds=60.0)
    for metrics, worker in everyones[1:]:
        assert [each["loss"] for each in metrics] == [each["loss"] for each in everyones[0][0]]
        for name, tensor in worker.masters().items():
            assert torch.equal(tensor, everyones[0][1].masters()[name])
    return everyones[0]


CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "m2po": {"algorithm": "m2po"},
    "m2po mask": {"algorithm": "m2po", "m2_variant": "mask"},
    "reinforce_plus_plus": {"algorithm": "reinforce_plus_plus"},
    "ppo": {"algorithm": "ppo", "updates": 2},
    "everything": {
        "algorithm": "dapo", "updates": 2, "epochs": 2, "truncate": 2.0, "overlong": {"longest": 8, "margin": 6},
        "kl": {"where": "reward", "coefficient": 0.1}, "overlong_filter": True, "entropy": 0.01,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in CASES), ("grpo", 4), ("everything", 4)])
def test_ranks_change_nothing_but_rounding(name: str, ranks: int) -> None:
    settings = {**FEW, **CASES[name], **SETTINGS.get(name, {})}
    batches = [random_rows(seed) for seed in (1, 2)]
    single = learner(small_model(), **settings)
    expected = [single.step([rows]) for rows in batches]
    found, worker = trained(lambda peers: learner(small_model(), peers=peers, **settings), batches, ranks)
    close(worker, single)
    unlike = {"tokens_per_second", "mfu"}
    for one, other in zip(expected, found, strict=True):
        for metric in {metric for metric in one if not metric.startswith("node_")} - unlike:
            assert other[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-4), metric


def test_a_rank_without_rows_takes_part() -> None:
    rows = random_rows(1)
    single = learner(small_model(), **FEW)
    single.step([rows])

    def run(peers: Peers) -> Worker:
        worker = learner(small_model(), peers=peers, **FEW)
        worker.step([rows] if peers.rank == 1 else [no_rows()])
        return worker

    for worker in as_peers(2, run):
        close(worker, single)


@pytest.mark.parametrize("algorithm", ["m2po", "ppo"])
def test_where_models_are_sharded_all_ranks_run_as_many_micro_batches(algorithm: str) -> None:
    """Every pass through such a model is a collective: those with fewer rows run idle ones, which change nothing."""
    rows = random_rows(1)
    settings: dict[str, Any] = {"algorithm": algorithm, **FEW, "micro_tokens": 15}
    single = learner(small_model(), **settings)
    single.step([rows])

    def run(peers: Peers) -> tuple[int, Worker]:
        asked: list[int] = []
        worker = learner(small_model(), peers=peers, sharding="fsdp", **settings)
        worker.step([taking(rows, (rows.member_R == 0) == (peers.rank == 0))], lambda: asked.append(1))
        return len(asked), worker

    (few, one), (many, other) = as_peers(2, run)
    assert few == many
    close(one, single)
    close(other, single)
