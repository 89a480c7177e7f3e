"""Norms and gates by compiled loops, against the library's own modules."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from packed_helpers import VOCAB, branching
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.kernels import layers
from rillflow.trainer.attention import hidden_states
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.fused import compile_ahead, fuse
from rillflow.trainer.packing import micro_batches

SMALL = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, **HEADS)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, **HEADS, head_dim=8)),
    "qwen3 window": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SMALL, **HEADS, head_dim=8, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    ),
}


def learnt(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and the gradients that they give."""
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return logits.detach(), [part.grad.clone() for part in model.parameters() if part.grad is not None]


# Two fp32 forwards that add in different orders are about 1e-6 of the largest value apart, and gradients, which add up
# over tokens, 1e-5: 1e-4 and 1e-3 hold with every BLAS, with and without fused multiply-add.
@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for part in model.parameters():
            part.add_(0.3 * torch.randn_like(part))
    fused = copy.deepcopy(model)
    fuse(fused)
    tokens = torch.randint(50, (3, 17))
    (plain, of_plain), (ours, of_ours) = learnt(model, tokens), learnt(fused, tokens)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert len(of_ours) == len(of_plain)
    for mine, theirs in zip(of_ours, of_plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers_and_gradients_of_packed_rows(name: str) -> None:
    """Also in models that normalise and rotate queries and keys directly after the projections."""
    torch.manual_seed(0)
    model = MODELS[name]()
    fused = copy.deepcopy(model)
    fuse(fused)
    (make,) = micro_batches(Databuffer(branching(3)), [], 1 << 20, device=torch.device("cpu"), trees=True)
    layout = replace(make().layout, tokens_P=make().layout.tokens_P % 50)
    seen = []
    for one in (model, fused):
        hidden_PD = hidden_states(one, layout, "sdpa")
        pull_PD = torch.randn(hidden_PD.shape, generator=torch.Generator().manual_seed(1))
        hidden_PD.backward(pull_PD)
        seen.append((hidden_PD.detach(), {key: part.grad for key, part in one.named_parameters()}))
    (plain_PD, of_plain), (ours_PD, of_ours) = seen
    torch.testing.assert_close(ours_PD, plain_PD, rtol=1e-4, atol=1e-4)
    for key, theirs in of_plain.items():
        assert (of_ours[key] is None) == (theirs is None), key
        if theirs is not None:
            torch.testing.assert_close(of_ours[key], theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()), msg=key)


def test_what_packed_attention_does_not_have_is_refused_by_fused_layers_too() -> None:
    model = MODELS["qwen3"]().train()
    fuse(model)
    model.model.layers[0].self_attn.attention_dropout = 0.5
    (make,) = micro_batches(Databuffer(branching(3)), [], 1 << 20, device=torch.device("cpu"), trees=True)
    layout = replace(make().layout, tokens_P=make().layout.tokens_P % 50)
    with pytest.raises(ConfigError, match="dropout"):
        hidden_states(model, layout, "sdpa")


def test_all_that_is_known_is_fused_and_nothing_else() -> None:
    model = MODELS["qwen3"]()
    fuse(model)
    changed = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    assert changed == {"Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"}
    other = MODELS["llama"]()
    other.model.layers[0].mlp.act_fn = torch.nn.GELU()
    fuse(other)
    assert "forward" not in vars(other.model.layers[0].mlp)


class _Ones(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(x)


def test_a_rehearsal_compiles_what_a_step_uses() -> None:
    """None of the loops is compiled again for the types of a real model."""
    compile_ahead().join(120)
    loops = [loop for name, loop in vars(layers).items() if name.endswith("_loop")]
    known = [len(loop.signatures) for loop in loops]
    assert len(known) == 6
    assert all(known)
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL | {"vocab_size": VOCAB}, **HEADS, head_dim=8))
    (make,) = micro_batches(Databuffer(branching(3)), [], 1 << 20, device=torch.device("cpu"), trees=True)
    logprob_T, _ = PolicyForward(model, TrainerConfig(trees=True))(make())
    logprob_T.sum().backward()
    assert [len(loop.signatures) for loop in loops] == known


def test_the_process_waits_for_the_compiling_thread_at_its_end() -> None:
    assert not compile_ahead().daemon  # one inside torch would abort the process


def test_extremes_of_gates() -> None:
    model = MODELS["llama"]()
    fuse(model)
    mlp = model.model.layers[0].mlp
    gate = torch.tensor([-1e4, -200.0, -88.0, -20.0, 0.0, 20.0, 200.0, 1e30])
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = torch.nn.Identity(), _Ones(), torch.nn.Identity()
    torch.testing.assert_close(mlp(gate), torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-30)
    assert mlp(torch.tensor([torch.nan])).isnan().all()
