"""Which backend a model gets, and which models are refused by name."""

from __future__ import annotations

import pytest
import torch
from packed_helpers import CPU, branching, grouped_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from rillflow.errors import ConfigError
from rillflow.trainer.attention import asked, choose, hidden_states
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


def sinking() -> PreTrainedModel:
    config = GptOssConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_local_experts=2)
    return GptOssForCausalLM(config).eval()


def two_ways() -> PreTrainedModel:
    config = Gemma3TextConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, use_bidirectional_attention=True)
    return Gemma3ForCausalLM(config).eval()


def test_auto_packs_wherever_it_can() -> None:
    model = grouped_model(dtype=torch.float32)
    assert choose(model, "auto", CPU) == "sdpa"
    assert choose(model, "auto", CPU, dtype=torch.bfloat16) == "sdpa"
    assert choose(model, "auto", GPU, dtype=torch.bfloat16) == "varlen"
    assert choose(model, "auto", GPU) == "sdpa"  # flash attention has no fp32
    assert choose(sliding(None), "auto", CPU) == "sdpa"
    assert choose(capped(), "auto", CPU) == "sdpa"
    assert choose(sliding(8), "auto", CPU, trees=True) == "sdpa"


def test_auto_takes_flex_where_flash_attention_lacks_something(caplog: pytest.LogCaptureFixture) -> None:
    """And says why."""
    caplog.set_level("INFO", "rillflow.trainer.attention")
    half = torch.bfloat16
    assert choose(sliding(8), "auto", GPU, dtype=half) == "varlen"
    assert choose(sinking(), "auto", GPU, dtype=half) == "varlen"
    assert not caplog.messages
    for model, trees, dtype, reason in (
        (sliding(8), True, half, "window, which flash attention does not have in trees"),
        (sinking(), True, half, "window, which flash attention does not have in trees"),
        (capped(), False, half, "caps its attention scores"),
        (sliding(8), False, torch.float32, "bf16"),
    ):
        assert choose(model, "auto", GPU, dtype=dtype, trees=trees) == "flex"
        assert "flex" in caplog.messages[-1]
        assert reason in caplog.messages[-1]
    assert choose(sliding(None), "auto", GPU) == "sdpa"
    assert choose(two_ways(), "auto", CPU) == "padded"
    assert "both directions" in caplog.messages[-1]


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


@pytest.mark.parametrize("wanted", ["varlen", "cudnn"])
def test_flash_attention_refuses_what_it_lacks(wanted: str) -> None:
    assert choose(sliding(8), wanted, GPU, dtype=torch.bfloat16) == wanted
    with pytest.raises(ConfigError, match="in trees"):
        choose(sliding(8), wanted, GPU, dtype=torch.bfloat16, trees=True)
    with pytest.raises(ConfigError, match="caps its attention scores"):
        choose(capped(), wanted, GPU, dtype=torch.bfloat16)


def test_models_that_cannot_be_packed_are_refused_by_name() -> None:
    hybrid = Qwen3NextConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=2)
    unnamed = PhimoeConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, sliding_window=8)
    chunked = Llama4TextConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_local_experts=2)
    for model, reason in (
        (Qwen3NextForCausalLM(hybrid), r"Qwen3NextModel"),
        (PhimoeForCausalLM(unnamed), r"PhimoeModel has a sliding window that its layers do not name"),
        (Llama4ForCausalLM(chunked), r"has layers of chunked_attention"),
        (two_ways(), r"Gemma3TextModel attends in both directions"),
    ):
        with pytest.raises(ConfigError, match=reason):
            choose(model, "sdpa", CPU)


def test_trees_need_a_backend_that_reads_them() -> None:
    assert choose(grouped_model(), "auto", CPU, trees=True) == "sdpa"
    for model, wanted in ((grouped_model(), "padded"), (two_ways(), "auto")):
        with pytest.raises(ConfigError, match="trees") as refused:
            choose(model, wanted, CPU, trees=True)
        assert "trainer.trees: false" in refused.value.hint


def test_padded_refuses_trees_and_layers_refuse_what_they_cannot_compute() -> None:
    (make,) = micro_batches(Databuffer(branching(0)), [], 10_000, device=CPU, trees=True)
    with pytest.raises(ConfigError, match="trees"):
        hidden_states(grouped_model(), make().layout, "padded")
    with pytest.raises(ConfigError, match="position_bias"):
        asked(torch.nn.Linear(1, 1), 0.0, {"position_bias": torch.zeros(1)})
