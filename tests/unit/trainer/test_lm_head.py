"""Log-probs in pieces against a full log_softmax: values, gradients, and what is kept for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainer_helpers import small_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from rillflow.config import TrainerConfig
from rillflow.trainer.lm_head import PolicyHead, own_logits

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def granite() -> PreTrainedModel:
    torch.manual_seed(1)
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=5.0, initializer_range=0.5))


def gemma() -> PreTrainedModel:
    torch.manual_seed(1)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=3.0, initializer_range=0.5))


def cohere() -> PreTrainedModel:
    torch.manual_seed(1)
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25, initializer_range=0.5))


def biased() -> PreTrainedModel:
    model = small_model(tied=False)
    model.lm_head = torch.nn.Linear(16, 40)
    return model


class Odd(torch.nn.Linear):
    """A head of an unknown kind."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).sinh().asinh() + hidden.sum(-1, keepdim=True).cos()


def odd() -> PreTrainedModel:
    model = small_model(tied=False)
    model.lm_head = Odd(16, 40)
    return model


MODELS = {"qwen": small_model, "granite": granite, "gemma": gemma, "cohere": cohere, "biased": biased, "odd": odd}


def drawn(
    model: PreTrainedModel, dtype: torch.dtype, count: int = 11
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    vocabulary, width = model.get_output_embeddings().weight.shape
    hidden_TD = torch.randn(count, width, generator=generator).to(dtype).requires_grad_()
    target_T = torch.randint(vocabulary, (count,), generator=generator)
    return hidden_TD, target_T, (torch.rand(count, generator=generator) + 0.5).to(dtype)


def in_full(
    model: PreTrainedModel, hidden_TD: torch.Tensor, target_T: torch.Tensor, temperature_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    all_TV = torch.log_softmax(own_logits(model, hidden_TD) / temperature_T[:, None], -1)
    return all_TV.gather(1, target_T[:, None])[:, 0], -(all_TV.exp() * all_TV).sum(-1)


def slopes(model: PreTrainedModel, loss: torch.Tensor, hidden_TD: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    hidden_TD.grad = None
    loss.backward()
    assert hidden_TD.grad is not None
    of = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return of | {"hidden": hidden_TD.grad.clone()}


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients_are_those_of_a_full_log_softmax(kind: str, dtype: torch.dtype, close: float) -> None:
    model = MODELS[kind]().to(dtype)
    tokens = drawn(model, dtype)
    generator = torch.Generator().manual_seed(5)
    weights_2T = torch.randn(2, len(tokens[1]), generator=generator).to(dtype)
    head = PolicyHead(model, TrainerConfig(head_tokens=4, entropy=0.1))
    seen = []
    for logprob_T, entropy_T in (head(*tokens), in_full(model, *tokens)):
        gradients = slopes(model, (weights_2T * torch.stack([logprob_T, entropy_T])).sum(), tokens[0])
        seen.append({"logprob": logprob_T, "entropy": entropy_T} | gradients)
    ours, full = seen
    assert set(ours) == set(full)
    for name, value in full.items():
        assert torch.allclose(ours[name], value, rtol=close, atol=close), name


@pytest.mark.parametrize(("kind", "known"), [(kind, kind != "odd") for kind in MODELS])
def test_only_unknown_heads_run_themselves(kind: str, known: bool) -> None:
    assert PolicyHead(MODELS[kind](), TrainerConfig())._known is known


def test_a_scaling_that_the_config_does_not_tell_is_found_out() -> None:
    model = granite()
    head = PolicyHead(model, TrainerConfig())
    model.config.logits_scaling = 2.0
    assert not head._agrees()


def test_entropy_has_a_gradient_only_where_it_is_asked_for() -> None:
    model = small_model()
    tokens = drawn(model, torch.float32)
    assert not PolicyHead(model, TrainerConfig())(*tokens)[1].requires_grad
    assert PolicyHead(model, TrainerConfig(entropy=0.1))(*tokens)[1].requires_grad
    assert not PolicyHead(odd(), TrainerConfig())(*tokens)[1].requires_grad


@pytest.mark.parametrize("kind", ["qwen", "odd"])
def test_nothing_of_the_size_of_many_logits_is_kept_for_backward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.trainer.lm_head._FEW", 1000)
    model = MODELS[kind]()
    tokens = drawn(model, torch.float32, count=600)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def bytes_kept(scores: Any) -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = scores()
        del result
        return sum(kept.values())

    head = PolicyHead(model, TrainerConfig(head_tokens=16))
    vocabulary = model.get_output_embeddings().weight.shape[0]
    logits = 600 * vocabulary * 4
    assert bytes_kept(lambda: in_full(model, *tokens)) > logits
    # The hidden states and the weight, which exist anyway, and a few numbers for each token.
    inputs = tokens[0].nbytes + model.get_output_embeddings().weight.nbytes
    assert bytes_kept(lambda: head(*tokens)) <= inputs + 600 * 4 * 10 < inputs + logits


def test_a_frozen_head_passes_the_gradient_on() -> None:
    model = small_model().requires_grad_(False)
    tokens = drawn(model, torch.float32)
    logprob_T, _ = PolicyHead(model, TrainerConfig())(*tokens)
    logprob_T.sum().backward()
    assert tokens[0].grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_token_is_no_score() -> None:
    model = small_model()
    logprob_T, entropy_T = PolicyHead(model, TrainerConfig())(*drawn(model, torch.float32, count=0))
    assert logprob_T.shape == entropy_T.shape == (0,)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 falls back, slowly
@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", ["qwen", "granite", "biased"])
def test_kept_probabilities_give_the_gradients_of_recomputed_logits(
    kind: str, dtype: torch.dtype, close: float
) -> None:
    model = MODELS[kind]().to(dtype)
    tokens = drawn(model, dtype)
    weight_T = torch.randn(len(tokens[1]), generator=torch.Generator().manual_seed(5))
    seen = []
    for recompute in (False, True):
        logprob_T, _ = PolicyHead(model, TrainerConfig(head_tokens=4, recompute=recompute))(*tokens)
        gradients = slopes(model, (weight_T * logprob_T).sum(), tokens[0])
        seen.append({"logprob": logprob_T.detach()} | gradients)
    kept, made_again = seen
    assert torch.equal(kept["logprob"], made_again["logprob"])
    for name, value in made_again.items():
        assert torch.allclose(kept[name].float(), value.float(), rtol=close, atol=close * float(value.abs().max())), (
            name
        )


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 falls back, slowly
def test_bf16_is_close_to_fp32() -> None:
    full, half = small_model(), small_model().to(torch.bfloat16)
    hidden_TD, target_T, temperature_T = drawn(full, torch.float32)
    one, _ = PolicyHead(full, TrainerConfig())(hidden_TD, target_T, temperature_T)
    other, _ = PolicyHead(half, TrainerConfig())(hidden_TD.bfloat16(), target_T, temperature_T)
    assert other.dtype is torch.float32
    assert torch.allclose(one, other, atol=0.1)
    assert not torch.equal(one, other)
