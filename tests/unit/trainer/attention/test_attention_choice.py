"""Which backend a model gets, and which models are refused by name."""

from __future__ import annotations

import pytest
import torch
from packed_helpers import CPU, branching, grouped_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from rillflow.errors import ConfigError
from rillflow.trainer.attention import choose, hidden_states
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.packing import micro_batches

GPU = torch.device("cuda")
SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def capped() -> PreTrainedModel:
    config = Gemma2Config(**SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=8)
    return Gemma2ForCausalLM(config).eval()


def sliding(window: int | None) -> PreTrainedModel:
    config = MistralConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=window)
    return MistralForCausalLM(config).eval()


def test_auto_packs_wherever_it_can() -> None:
    model = grouped_model(dtype=torch.float32)
    assert choose(model, "auto", CPU) == "sdpa"
    assert choose(model, "auto", CPU, dtype=torch.bfloat16) == "sdpa"
    assert choose(model, "auto", GPU, dtype=torch.bfloat16) == "varlen"
    assert choose(model, "auto", GPU) == "sdpa"  # flash attention has no fp32
    assert choose(sliding(None), "auto", CPU) == "sdpa"
    assert choose(capped(), "auto", CPU) == "padded"
    assert choose(sliding(8), "auto", CPU) == "padded"


@pytest.mark.parametrize("wanted", ["padded", "sdpa"])
def test_what_is_wanted_is_taken(wanted: str) -> None:
    assert choose(grouped_model(), wanted, CPU) == wanted


@pytest.mark.parametrize("wanted", ["varlen", "flex"])
def test_kernels_of_gpus_are_refused_on_the_cpu(wanted: str) -> None:
    with pytest.raises(ConfigError, match="GPU"):
        choose(grouped_model(), wanted, CPU, dtype=torch.bfloat16)


def test_varlen_is_refused_in_fp32() -> None:
    with pytest.raises(ConfigError, match="bf16"):
        choose(grouped_model(), "varlen", GPU, dtype=torch.float32)


def test_models_that_cannot_be_packed_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Gemma2Model.*sliding_attention"):
        choose(capped(), "sdpa", CPU)
    with pytest.raises(ConfigError, match=r"MistralModel.*sliding"):
        choose(sliding(8), "sdpa", CPU)


def test_trees_need_a_backend_that_reads_them() -> None:
    assert choose(grouped_model(), "auto", CPU, trees=True) == "sdpa"
    for model, wanted in ((grouped_model(), "padded"), (capped(), "auto")):
        with pytest.raises(ConfigError, match="trees") as refused:
            choose(model, wanted, CPU, trees=True)
        assert "trainer.trees: false" in refused.value.hint


def test_padded_refuses_trees_and_layers_refuse_what_they_cannot_compute() -> None:
    (make,) = micro_batches(Databuffer(branching(0)), [], 10_000, device=CPU, trees=True)
    with pytest.raises(ConfigError, match="trees"):
        hidden_states(grouped_model(), make().layout, "padded")
    with pytest.raises(ConfigError, match="sliding_window"):
        hidden_states(sliding(8), make().layout, "sdpa")
