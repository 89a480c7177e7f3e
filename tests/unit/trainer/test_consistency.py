"""How far engine and trainer are apart: what is counted, by whom, and when somebody is told."""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from trainer_helpers import learner, random_rows, random_samples, small_model

from peer_threads import as_peers
from rillflow.config import TrainerConfig
from rillflow.engine.embedded.exact import Reading, logprob
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.batches import Rows, make_rows
from rillflow.trainer.consistency import ALARMING, Consistency, Watch
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.graph.builtin import chain_of
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.learner import Learner
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel.peers import Alone, Peers


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
    """Before it, the weights are those of the trainer's version; after it they are nobody's."""
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
    for metrics, truncated, warnings in [({}, False, 0), (near, False, 0), (far, False, 1), (far, False, 1),
                                         (near, False, 1), (far, True, 2)]:  # fmt: skip
        watch.see(metrics, truncated=truncated)
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
