"""Every trainer backend keeps `contracts.Trainer`, and all compute the same losses and weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from trainer_helpers import in_parts, random_rows, small_model

from rillflow.config import TrainerConfig, load_recipe
from rillflow.contracts import Trainer
from rillflow.errors import CheckpointError, LeaseLost
from rillflow.trainer.backends import BACKENDS
from rillflow.trainer.parallel import Alone

Build = Callable[..., Trainer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    small_model().save_pretrained(path)
    return path


def build(folder: Path, backend: str, *settings: str) -> Trainer:
    keys = [f"trainer.backend={backend}", "trainer.lr=0.01", "trainer.micro_tokens=64", *settings]
    overrides = [f"policies.agent.{key}" for key in (f"model={folder}", *keys)]
    return BACKENDS[backend](load_recipe("quickstart", overrides), "agent", Alone())


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def nothing() -> None:
    """Neither abandon nor publish."""


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    held = {**trainer.masters(), **{f"moments/{name}": tensor for name, tensor in trainer.moments().items()}}
    return {name: tensor.clone() for name, tensor in held.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "settings",
    [(), ("trainer.kl.coefficient=0.1",), ("trainer.entropy=0.01", "trainer.updates=2", "trainer.batch_groups=3")],
    ids=["grpo", "kl", "entropy and two updates"],
)
def test_all_backends_give_the_same_losses_and_weights(folder: Path, settings: tuple[str, ...]) -> None:
    trainers = {name: build(folder, name, *settings) for name in BACKENDS}
    for step in range(3):
        told = {name: trainer.step([random_rows(step)], nothing, nothing) for name, trainer in trainers.items()}
        ours = told.pop("rillflow")
        for metrics in told.values():
            for name in ("loss", "grad_norm", "entropy", "approx_kl", "ratio_mean", "reward_mean", "lr"):
                assert metrics[name] == pytest.approx(ours[name], abs=1e-5, rel=1e-5), name
    expected = trainers.pop("rillflow").weights(torch.float32)
    for trainer in trainers.values():
        found = trainer.weights(torch.float32)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            # AdamW divides by the gradient's size: where it is near zero, rounding decides its sign.
            assert (tensor - expected[name]).abs().mean() < 1e-5, name


def test_a_step_publishes_its_new_weights_once(folder: Path, backend: str) -> None:
    trainer = build(folder, backend)
    before, published = state(trainer), []
    trainer.step([random_rows(0)], nothing, lambda: published.append(not same(before, state(trainer))))
    assert published == [True]
    assert trainer.steps == 1
    assert not trainer.generates
    assert trainer.adapter() is None


def test_an_abandoned_step_changes_nothing(folder: Path, backend: str) -> None:
    trainer, calls = build(folder, backend), []

    def check() -> None:
        calls.append(None)
        if len(calls) > 2:
            raise LeaseLost("the batch is lost")

    before = state(trainer)
    with pytest.raises(LeaseLost):
        trainer.step(in_parts(0, (4, 4, 4)), check, nothing)
    assert same(before, state(trainer))
    assert trainer.steps == 0
    trainer.step([random_rows(0)], nothing, nothing)
    straight = build(folder, backend)
    straight.step([random_rows(0)], nothing, nothing)
    assert same(state(straight), state(trainer)), "its gradients are dropped"


def test_a_restored_trainer_continues_bit_for_bit(folder: Path, backend: str) -> None:
    straight, first, second = (build(folder, backend) for _ in range(3))
    for step in range(2):
        straight.step([random_rows(step)], nothing, nothing)
    first.step([random_rows(0)], nothing, nothing)
    second.restore(first.masters(), first.moments(), first.steps)
    second.step([random_rows(1)], nothing, nothing)
    assert same(state(straight), state(second))
    assert second.steps == 2
    masters = {name: tensor[:1] for name, tensor in first.masters().items()}
    with pytest.raises(CheckpointError):
        second.restore(masters, first.moments(), 1)


def test_weights_have_the_names_and_dtype_that_engines_load(folder: Path, backend: str) -> None:
    trainer = build(folder, backend)
    weights = trainer.weights(torch.bfloat16)
    assert weights.keys() == small_model().state_dict().keys()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("settings", [{"trees": True}, {"ranks": 2}, {"optimizer": "muon"}, {"lora": {"rank": 2}}])
def test_options_of_our_own_backend_are_refused_elsewhere(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="backend: accelerate has no"):
        TrainerConfig(backend="accelerate", **settings)
