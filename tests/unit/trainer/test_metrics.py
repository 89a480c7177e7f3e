"""The measurements of a step: log-probs of engine and trainer, and values of kept episodes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from trainer_helpers import learner, random_rows, random_samples, small_model

from peer_threads import as_peers
from rillflow.config import TrainerConfig
from rillflow.engine.embedded.forward import Reading, logprob
from rillflow.trainer import metrics
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.batches import Databuffer, Rows, make_rows, sample_key
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.graph.builtin import chain_of
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.learner import Learner
from rillflow.trainer.metrics import ALARMING, Consistency, Watch
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Alone, Peers
from rillflow.types import BatchSample


def scored(rows: Rows) -> Rows:
    """With the trainer's own log-probs in place of the engine's."""
    config, model = TrainerConfig(), small_model()
    actor = Learner("actor", model, PolicyForward(model, config), None, config, Alone())
    return replace(rows, old_N=actor.infer(Databuffer(rows)))


def test_a_token_is_fresh_that_the_trainers_own_version_sampled() -> None:
    samples, payload = random_samples(0)
    samples = [msgspec.structs.replace(sample, policy="agent") for sample in samples]
    samples[1] = msgspec.structs.replace(samples[1], policy="other")
    rows = make_rows(samples, payload, "agent", 1)
    versions_N = np.concatenate([row["versions"] for row in payload])
    own_N = np.repeat(np.arange(len(samples)) != 1, rows.length_R)
    assert rows.fresh_N.any()
    assert np.array_equal(rows.fresh_N, rows.mask_N & own_N & (versions_N == 1))
    assert not make_rows(samples, payload).fresh_N.any(), "a trainer at no version has no fresh tokens"


def test_the_numbers_are_those_of_all_differences() -> None:
    rng = np.random.default_rng(0)
    trainer, fresh = rng.normal(-2, 1, 5000), rng.random(5000) < 0.7
    engine = trainer + 10 ** rng.uniform(-6, 0, 5000) * rng.choice([-1, 1], 5000)
    engine[:100] = trainer[:100]
    seen = Consistency()
    for part in np.array_split(np.arange(5000), 7):
        seen.add(*(torch.tensor(array[part]) for array in (trainer, engine, fresh)))
    values = seen.values(Alone())
    for kind, at in (("", fresh), ("stale_", ~fresh)):
        apart = np.abs(trainer - engine)[at]
        assert values[f"consistency/{kind}tokens"] == at.sum()
        assert values[f"consistency/{kind}mean"] == pytest.approx(apart.mean())
        assert values[f"consistency/{kind}shift"] == pytest.approx((trainer - engine)[at].mean())
        assert values[f"consistency/{kind}max"] == pytest.approx(apart.max())
        assert apart.max() >= values[f"consistency/{kind}p99"] >= np.percentile(apart, 99) * 0.99
        assert values[f"consistency/{kind}p99"] <= np.percentile(apart, 99) * 1.06
        assert values[f"consistency/{kind}ratio"] == pytest.approx(np.exp(trainer - engine)[at].mean())


def test_what_is_infinitely_apart_is_of_its_own_kind_alone() -> None:
    measured = Consistency()
    measured.add(torch.zeros(0), torch.zeros(0), torch.zeros(0))
    measured.add(torch.tensor([-torch.inf, -1.0]), torch.tensor([-1.0, -1.5]), torch.tensor([1.0, 0.0]))
    values = measured.values(Alone())
    assert values["consistency/max"] == torch.inf
    assert (values["consistency/stale_max"], values["consistency/stale_tokens"]) == (0.5, 1.0)


def test_no_difference_is_exactly_none_and_no_token_has_no_numbers() -> None:
    seen = Consistency()
    same = torch.linspace(-3, 0, 9)
    seen.add(same, same, torch.ones(9))
    values = seen.values(Alone())
    assert [values[f"consistency/{name}"] for name in ("mean", "max", "p99", "ratio")] == [0.0, 0.0, 0.0, 1.0]
    assert {name for name in values if "stale" in name} == {"consistency/stale_tokens"}


@pytest.mark.parametrize("settings", [{}, {"updates": 3}, {"truncate": 2.0}, {"algorithm": "m2po"}])
def test_a_step_measures_its_first_update(settings: dict[str, object]) -> None:
    """Before it, the weights are those of the trainer's version; after it they belong to no version."""
    rows = scored(random_rows(1, near=-3.4))
    fresh_N = rows.mask_N & (np.arange(len(rows.mask_N)) % 2 == 0)
    off_N = np.where(fresh_N, 0.01, 0.5).astype(np.float32)
    shifted = replace(rows, fresh_N=fresh_N, old_N=np.where(rows.mask_N, rows.old_N - off_N, 0.0).astype(np.float32))
    metrics = learner(lr=0.1, batch_groups=3, **settings).step([shifted])
    first = np.random.default_rng((0, 0, 0)).permutation(3)[shifted.member_R] == 0  # which group the seed draws first
    if "updates" not in settings:
        first[:] = True
    of_first_N = np.repeat(first, shifted.length_R)
    assert metrics["consistency/tokens"] == (fresh_N & of_first_N).sum()
    assert metrics["consistency/stale_tokens"] == (shifted.mask_N & ~fresh_N & of_first_N).sum()
    assert metrics["consistency/mean"] == pytest.approx(0.01, rel=0.01)
    assert metrics["consistency/max"] == pytest.approx(0.01, rel=0.01)
    assert metrics["consistency/ratio"] == pytest.approx(np.exp(0.01), rel=1e-3)
    assert metrics["consistency/stale_mean"] == pytest.approx(0.5, rel=0.01)


def test_ranks_have_the_numbers_of_all() -> None:
    apart = torch.tensor([0.1, 0.2, 0.4])

    def measured(peers: Peers) -> dict[str, float]:
        seen = Consistency()
        if peers.rank:  # the other rank has no rows
            seen.add(apart, torch.zeros(3), torch.ones(3))
        return seen.values(peers)

    for values in as_peers(2, measured):
        assert values["consistency/tokens"] == 3
        assert values["consistency/mean"] == pytest.approx(0.7 / 3)
        assert values["consistency/max"] == pytest.approx(0.4)


def test_a_warning_says_what_to_do_once(caplog: pytest.LogCaptureFixture) -> None:
    watch, caplog.handler.level = Watch(), logging.WARNING
    far = {"consistency/mean": ALARMING * 2, "consistency/p99": 0.5, "consistency/ratio": 0.9}
    near = far | {"consistency/mean": ALARMING / 2}
    for values, truncated, warnings in [({}, False, 0), (near, False, 0), (far, False, 1), (far, False, 1),
                                        (near, False, 1), (far, True, 2)]:  # fmt: skip
        watch.see(values, truncated=truncated)
        assert len(caplog.records) == warnings
    assert "trainer.truncate: 2" in caplog.records[0].getMessage()
    assert "engine.dtype" in caplog.records[0].getMessage()
    assert "trainer.truncate corrects" in caplog.records[1].getMessage()


# ------------------------------------------------------------ bit for bit


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_exact_forward_has_the_bits_of_a_sequence_that_grows(temperature: float) -> None:
    """Read token by token, as an engine does, or a whole row at once with gradients: the same log-probs."""
    rows = random_rows(3, longest=50)
    rows = replace(rows, temperature_N=np.full_like(rows.temperature_N, temperature))
    model, config = small_model(), TrainerConfig(micro_tokens=64)
    with torch.inference_mode():
        for row in range(len(rows.start_R)):
            tokens = torch.from_numpy(rows.tokens_N[rows.start_R[row] :][: rows.length_R[row]]).long()
            reading = Reading(small_model())
            for at in range(1, len(tokens)):
                rows.old_N[rows.start_R[row] + at] = logprob(reading(tokens[:at])[0], int(tokens[at]), temperature)
    actor = Learner("actor", model, PolicyForward(model, config, exact=True), None, config, Alone(), in_order=True)
    other = small_model()  # the plain forward changes its model's modules
    plain = Learner("actor", other, PolicyForward(other, config), None, config, Alone(), in_order=True)
    assert np.array_equal(actor.infer(Databuffer(rows))[rows.mask_N], rows.old_N[rows.mask_N])
    assert actor.infer(Databuffer(rows)) == pytest.approx(plain.infer(Databuffer(rows)), abs=1e-5)


def test_the_exact_forward_learns_what_the_plain_one_learns() -> None:
    rows = scored(random_rows(1))
    steps = []
    for exact in (False, True):
        config, model = TrainerConfig(lr=1e-2, entropy=0.01), small_model()
        optimizer = Optimizer(model, config, Alone())
        actor = Learner("actor", model, PolicyForward(model, config, exact=exact), optimizer, config, Alone())
        worker = Worker(chain_of(config), {"actor": actor}, ALGORITHMS[config.algorithm](config), config, Alone())
        metrics = worker.step([rows])
        steps.append((metrics["loss"], metrics["grad_norm"], metrics["entropy"]))
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)


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
    monkeypatch.setattr(metrics, "MOST_TOKENS", 30)
    at_work = worker()
    at_work.step([make_rows(samples, payload, keep={sample.task for sample in samples})])
    assert 0 < sum(len(one.at) // 4 for one in at_work.kept) <= 30


def test_a_name_that_is_too_large_is_none() -> None:
    (sample, *_), _ = named_samples()
    assert sample_key(msgspec.structs.replace(sample, id="g.1048576.0")) == 0
    assert sample_key(msgspec.structs.replace(sample, member=1 << 20)) == 0
    assert sample_key(sample) == 1


def test_each_rank_tells_of_its_own_rows() -> None:
    samples, payload = named_samples()
    keep = {samples[0].task, samples[5].task}

    def told(peers: Peers) -> list[tuple[int, int]]:
        own = slice(peers.rank, None, 2)
        at_work = worker(peers)
        at_work.step([make_rows(samples[own], payload[own], keep=keep)])
        return [(one.member, one.place) for one in at_work.kept]

    assert as_peers(2, told) == [[(0, 0)], [(1, 1)]]
