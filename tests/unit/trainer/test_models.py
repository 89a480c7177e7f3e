"""The models of a trainer's roles: exact fp32, recomputed layers, scalar heads, frozen references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_forward import gradients, micro
from trainer_helpers import small_model

from rillflow.config import KlConfig, LoraConfig, PolicyConfig, TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.models import decoder_layers, policy_model, reference_model, reward_model, scalar_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    small_model().save_pretrained(path)
    return str(path)


def policy(folder: str, **settings: Any) -> PolicyConfig:
    return PolicyConfig(model=folder, trainer=TrainerConfig(**settings))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_that_trains_is_what_its_files_have(folder: str, dtype: str) -> None:
    model = policy_model(policy(folder, dtype=dtype), CPU)
    for name, tensor in small_model().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_recomputing_layers_changes_no_number_and_keeps_less(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.trainer.heads._FEW", 0)  # the head computes its logits again either way
    batch, seen = micro(), []
    for recompute in (False, True):
        settings = policy(folder, recompute=recompute)
        model = policy_model(settings, CPU)
        kept: list[int] = []

        def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            score_T, _ = PolicyForward(model, settings.trainer)(batch)
        seen.append((score_T.detach(), sum(kept), gradients(model, score_T)))
    assert torch.equal(seen[0][0], seen[1][0])
    assert seen[1][1] < seen[0][1] / 2
    assert all(torch.equal(gradient, seen[1][2][name]) for name, gradient in seen[0][2].items())


def test_layers_are_found_in_order(folder: str) -> None:
    model = policy_model(policy(folder), CPU)
    assert decoder_layers(model) == list(model.model.layers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiled_layers_give_the_same_for_any_length(folder: str) -> None:
    torch._dynamo.reset()
    plain, fast = policy(folder), policy(folder, compile=True, recompute=True)
    one, other = policy_model(plain, CPU), policy_model(fast, CPU)
    eager, compiled = PolicyForward(one, plain.trainer), PolicyForward(other, fast.trainer)
    graphs = []
    for lengths in ((7, 4, 9), (5, 13), (3, 3, 3, 8), (4, 11, 6)):
        batch = micro(lengths)
        expected_T, found_T = eager(batch)[0], compiled(batch)[0]
        assert torch.allclose(expected_T, found_T, atol=1e-5)
        expected, found = gradients(one, expected_T), gradients(other, found_T)
        assert all(torch.allclose(found[name], expected[name], atol=1e-4) for name in expected)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[-2], "new lengths are compiled again and again"


def test_a_new_scalar_head_is_small_and_comes_from_the_seed(folder: str) -> None:
    first, again, other = (scalar_model(folder, CPU, TrainerConfig(), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    assert ScalarForward(first, TrainerConfig())(micro()).abs().max() < 2
    assert torch.equal(first.model.embed_tokens.weight, small_model().model.embed_tokens.weight)


def test_a_trained_scalar_head_is_kept(folder: str, tmp_path: Path) -> None:
    trained = scalar_model(folder, CPU, TrainerConfig(), seed=1)
    trained.save_pretrained(tmp_path)
    for loaded in (
        scalar_model(str(tmp_path), CPU, TrainerConfig(), seed=5),
        reward_model(str(tmp_path), CPU, TrainerConfig()),
    ):
        assert torch.equal(loaded.score.weight, trained.score.weight)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_a_policy_is_no_reward_model(folder: str) -> None:
    with pytest.raises(ConfigError, match="no reward model"):
        reward_model(folder, CPU, TrainerConfig())


def test_the_reference_is_frozen_and_stays_behind(folder: str) -> None:
    settings = policy(folder, kl=KlConfig(), dtype="bf16")
    trained = policy_model(settings, CPU)
    reference = reference_model(settings, trained, CPU)
    assert reference is not trained
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert reference.dtype is torch.bfloat16


def test_with_lora_the_reference_is_the_policy_itself(folder: str) -> None:
    settings = policy(folder, kl=KlConfig(), lora=LoraConfig(rank=2))
    trained = policy_model(settings, CPU)
    assert reference_model(settings, trained, CPU) is trained
    named = policy(folder, kl=KlConfig(reference=folder), lora=LoraConfig(rank=2))
    assert reference_model(named, trained, CPU) is not trained
