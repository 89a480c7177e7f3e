"""What a trainer tells of episodes that are kept: the advantages and log-probs that its step was made with."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from trainer_helpers import random_samples, small_model

from peer_threads import as_peers
from rillflow.config import TrainerConfig
from rillflow.trainer import kept
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.batches import make_rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.graph.builtin import chain_of
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.learner import Learner
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel.peers import Alone, Peers
from rillflow.types import BatchSample


def named_samples() -> tuple[list[BatchSample], list[dict[str, np.ndarray]]]:
    samples, payload = random_samples(0)
    named = [
        msgspec.structs.replace(sample, id=f"{sample.group}.{n % 4}.{n % 2}", task=f"{sample.group}.{n % 4}")
        for n, sample in enumerate(samples)
    ]
    return named, payload


def worker(peers: Peers | None = None, **settings: Any) -> Worker:
    peers = peers or Alone()
    config, model = TrainerConfig(lr=1e-2, micro_tokens=40, **settings), small_model()
    actor = Learner("actor", model, PolicyForward(model, config), Optimizer(model, config, peers), config, peers)
    return Worker(chain_of(config), {"actor": actor}, ALGORITHMS[config.algorithm](config), config, peers)


@pytest.mark.parametrize("settings", [{}, {"trees": True}, {"algorithm": "reinforce_plus_plus"}], ids=str)
def test_it_tells_what_the_step_was_made_with(settings: dict[str, Any]) -> None:
    samples, payload = named_samples()
    keep = {samples[1].task, samples[6].task, samples[11].task}
    rows = make_rows(samples, payload, keep=keep)
    before = small_model()
    scored_N = Learner("actor", before, PolicyForward(before, TrainerConfig()), None, TrainerConfig(), Alone()).infer(
        Databuffer(rows)
    )
    at_work = worker(**settings)
    at_work.step([rows])
    assert [(one.member, one.place, one.number) for one in at_work.kept] == [(0, 1, 1), (1, 2, 0), (2, 3, 1)]
    for one, row in zip(at_work.kept, (1, 6, 11), strict=True):
        start, length = int(rows.start_R[row]), int(rows.length_R[row])
        at = np.frombuffer(one.at, "<i4")
        assert sorted(at.tolist()) == np.flatnonzero(rows.mask_N[start : start + length]).tolist()
        logprobs = np.frombuffer(one.logprobs, "<f4")
        assert logprobs == pytest.approx(scored_N[start + at], abs=1e-4)
        advantages = np.frombuffer(one.advantages, "<f4")
        if not settings.get("algorithm"):
            assert np.unique(advantages).size == 1
            better = samples[row].reward > samples[row].group_mean
            assert (advantages[0] > 0) == better


def test_rows_that_nobody_keeps_are_not_told_of() -> None:
    samples, payload = named_samples()
    at_work = worker()
    at_work.step([make_rows(samples, payload)])
    assert at_work.kept == []


def test_several_updates_tell_of_every_sample_once() -> None:
    samples, payload = named_samples()
    rows = make_rows(samples, payload, keep={sample.task for sample in samples})
    at_work, once = worker(updates=2, epochs=2, batch_groups=3), worker(batch_groups=3)
    at_work.step([rows])
    once.step([rows])
    assert [(one.member, one.place, one.number, len(one.at)) for one in at_work.kept] == [
        (one.member, one.place, one.number, len(one.at)) for one in once.kept
    ]
    same = [one.logprobs == other.logprobs for one, other in zip(at_work.kept, once.kept, strict=True)]
    assert any(same), "the first mini-batch is scored by the weights before the step"
    assert not all(same), "the second by those after the first update"


def test_what_is_told_of_a_step_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, payload = named_samples()
    monkeypatch.setattr(kept, "MOST_TOKENS", 30)
    at_work = worker()
    at_work.step([make_rows(samples, payload, keep={sample.task for sample in samples})])
    assert 0 < sum(len(one.at) // 4 for one in at_work.kept) <= 30


def test_a_name_that_is_too_large_is_none() -> None:
    (sample, *_), _ = named_samples()
    assert kept.key_of(msgspec.structs.replace(sample, id="g.1048576.0")) == 0
    assert kept.key_of(msgspec.structs.replace(sample, member=1 << 20)) == 0
    assert kept.key_of(sample) == 1


def test_each_rank_tells_of_its_own_rows() -> None:
    samples, payload = named_samples()
    keep = {samples[0].task, samples[5].task}

    def told(peers: Peers) -> list[tuple[int, int]]:
        own = slice(peers.rank, None, 2)
        at_work = worker(peers)
        at_work.step([make_rows(samples[own], payload[own], keep=keep)])
        return [(one.member, one.place) for one in at_work.kept]

    assert as_peers(2, told) == [[(0, 0)], [(1, 1)]]
