"""From the engine to the trainer nothing changes: same ids, and log-probs that the trainer's forward agrees with."""

from __future__ import annotations

import numpy as np
import pytest

from engine_log import LoggedEngine, trained_turns
from playing import play_episodes
from rillflow.config import SamplingConfig, TrainerConfig
from rillflow.gateway.trees.record import Sample
from rillflow.trainer.batches import Databuffer, make_rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.learner import Learner
from rillflow.trainer.parallel import Alone
from rillflow.types import BatchSample, Row
from rillflow.weights.models import load_policy_model, pick_device


def as_batch(samples: list[Sample]) -> list[BatchSample]:
    place = Row(unit="u", segment=0, offset=0, length=0)
    return [
        BatchSample(
            id=str(index), row=place, tokens=sample.tokens, trained=sample.trained, reward=0.0, group="t",
            group_mean=0.0, group_std=0.0, group_size=1, staleness=0, truncated=sample.truncated,
        )
        for index, sample in enumerate(samples)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(temperature=0.6), SamplingConfig(top_p=0.9, temperature=1.2)]
)
async def test_what_is_trained_is_what_was_sampled(sampling: SamplingConfig) -> None:
    engine = LoggedEngine(load_policy_model("tiny", "fp32", pick_device("cpu")), slots=8, context=160)
    await engine.start()
    samples = await play_episodes(engine, sampling, 16)
    await engine.close()
    assert max(len(trained_turns(sample)) for sample in samples) >= 2, "no episode used the tool"
    assert sorted(turn for sample in samples for turn in trained_turns(sample)) == sorted(engine.log)

    rows = make_rows(as_batch(samples), [sample.columns for sample in samples])
    for attention in ("padded", "sdpa"):
        config = TrainerConfig(attention=attention, trees=attention == "sdpa", micro_tokens=500)
        model = load_policy_model("tiny", "fp32", pick_device("cpu"))
        actor = Learner("actor", model, PolicyForward(model, config), None, config, Alone())
        new_N = actor.infer(Databuffer(rows))
        assert np.abs(new_N - rows.old_N)[rows.mask_N].max() < 1e-5


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.6)])
async def test_in_exact_mode_engine_and_trainer_have_the_same_bits(sampling: SamplingConfig) -> None:
    engine = LoggedEngine(load_policy_model("tiny", "fp32", pick_device("cpu")), slots=4, context=160, exact=True)
    await engine.start()
    samples = await play_episodes(engine, sampling, 4)
    await engine.close()
    rows = make_rows(as_batch(samples), [sample.columns for sample in samples])
    config, model = TrainerConfig(), load_policy_model("tiny", "fp32", pick_device("cpu"))
    actor = Learner("actor", model, PolicyForward(model, config, exact=True), None, config, Alone(), in_order=True)
    new_N = actor.infer(Databuffer(rows))
    assert np.abs(new_N - rows.old_N)[rows.mask_N].max() == 0.0
