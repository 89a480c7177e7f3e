"""Schedules of the learning rate, and update rules beside AdamW: against torch's own, and continued exactly."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from test_optimizer import accumulate, config, quiet_bf16, same, stepped
from trainer_helpers import small_model

from rillflow.config import TrainerConfig
from rillflow.errors import CheckpointError, ConfigError
from rillflow.trainer.optimizer import Optimizer, learning_rate
from rillflow.trainer.parallel import Alone
from rillflow.trainer.parallel.sharding import decoder_layers
from soak import repetitions


def rates(**settings: Any) -> list[float]:
    made = TrainerConfig(lr=1.0, steps=8, **settings)
    return [learning_rate(made, update) for update in range(10)]


def test_a_constant_rate_follows_the_warm_up() -> None:
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, *[1.0] * 7]
    assert rates() == [1.0] * 10


def test_a_linear_schedule_ends_at_the_last_update() -> None:
    expected = [1.0, 1.0, *(1 - n / 6 for n in range(1, 7)), 0.0, 0.0]
    assert rates(schedule="linear", warmup_steps=2)[1:] == pytest.approx(expected[1:])
    assert rates(schedule="linear", warmup_steps=2)[0] == 0.5
    assert rates(schedule="linear", min_lr=0.1)[7:] == pytest.approx([0.1, 0.1, 0.1])


def test_a_cosine_schedule_is_half_of_it_in_the_middle() -> None:
    found = rates(schedule="cosine", min_lr=0.2)
    assert found[3] == pytest.approx(0.6)
    assert found[7:] == pytest.approx([0.2] * 3)
    assert found[0] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 8)) / 2)


def test_wsd_holds_the_rate_and_then_falls() -> None:
    assert rates(schedule="wsd", decay_steps=4, warmup_steps=1) == pytest.approx(
        [1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    )


def test_every_update_of_a_batch_counts() -> None:
    made = TrainerConfig(lr=1.0, steps=2, updates=2, epochs=2, batch_groups=2, schedule="linear")
    assert [learning_rate(made, update) for update in (3, 7)] == pytest.approx([0.5, 0.0])


@pytest.mark.parametrize(
    "settings",
    [{"schedule": "wsd"}, {"decay_steps": 3}, {"min_lr": 0.1}, {"optimizer": "muon", "sharding": "fsdp"}],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"wsd|min_lr|sharding"):
        TrainerConfig(**settings)


@quiet_bf16
def test_muon_updates_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    model, settings = small_model(), config()
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters() if p.ndim == 2}
    matrices = [p for p in model.parameters() if id(p) in inside]
    rest = [p for p in model.parameters() if id(p) not in inside]
    assert len(matrices) == 2 * 7
    decay = settings.weight_decay
    rules = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-2, betas=settings.betas, weight_decay=decay, fused=True),
    ]
    for step in range(3):
        model.zero_grad()
        accumulate(model, step)
        accumulate(model, step + 100)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.25)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        for rule in rules:
            rule.step()
    ours = stepped(3, optimizer="muon")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in ours.masters().items())


@quiet_bf16
@pytest.mark.soak
@pytest.mark.parametrize("rule", ["muon", pytest.param("adamw_8bit", marks=pytest.mark.needs("torchao"))])
def test_restore_continues_bit_for_bit(rule: str) -> None:
    with torch.compiler.set_stance(repetitions("force_eager", "default")):  # compiling 8-bit AdamW takes 45 s
        assert_restored(rule)


def assert_restored(rule: str) -> None:
    straight, first = stepped(2, wide_model(), optimizer=rule), stepped(1, wide_model(), optimizer=rule)
    model = wide_model(seed=9)
    second = Optimizer(model, config(optimizer=rule), Alone())
    second.restore(first.masters(), first.moments(), first.steps)
    second.zero()
    accumulate(model, 1)
    accumulate(model, 101)
    second.update(0.25)
    assert same(straight, second)


def wide_model(seed: int = 0) -> Any:
    """A model with matrices of more than 4,096 weights, which 8-bit moments need."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = small_model().config.to_dict() | {"hidden_size": 64, "intermediate_size": 128}
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()


@quiet_bf16
@pytest.mark.parametrize(("written", "read"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_state_of_another_rule_is_refused(written: str, read: str) -> None:
    first, second = stepped(1, optimizer=written), stepped(0, optimizer=read)
    with pytest.raises(CheckpointError, match=r"another trainer\.optimizer"):
        second.restore(first.masters(), first.moments(), first.steps)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match="torchao"):
        Optimizer(small_model(), config(optimizer="adamw_8bit"), Alone())
