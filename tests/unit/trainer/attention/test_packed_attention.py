"""Every backend against each row alone: the same hidden states, the same gradients."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from packed_helpers import (
    CPU,
    branching,
    directions,
    exact_norms,
    gradients,
    grouped_model,
    loss_alone,
    loss_packed,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from rillflow.trainer.attention import decoder, hidden_states
from rillflow.trainer.batches import Databuffer, Rows
from rillflow.trainer.packing import micro_batches
from soak import repetitions

SHAPES = [("padded", False), ("sdpa", False), ("sdpa", True)]


def backward(model: PreTrainedModel, rows: Rows, backend: str, trees: bool, *, on: bool = False) -> float:
    """Gradients of the packed rows are left in the model."""
    model.zero_grad()
    weight_ND = directions(rows, model.config.hidden_size, model.dtype)
    total = 0.0
    for make in micro_batches(Databuffer(rows), [], 400, device=CPU, trees=trees, on=on):
        micro = make()
        loss = loss_packed(hidden_states(model, micro.layout, backend), micro, weight_ND)
        loss.backward()
        total += float(loss.detach())
    return total


def assert_equal_gradients(model: PreTrainedModel, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-30
        assert float((found[name] - gradient).abs().max()) <= tolerance * max(scale, 1.0), name


@pytest.mark.soak
@pytest.mark.parametrize("seed", repetitions([0, 2], range(4)))
@pytest.mark.parametrize(("backend", "trees"), SHAPES)
def test_gradients_are_those_of_each_row_alone(backend: str, trees: bool, seed: int) -> None:
    model = grouped_model(seed)
    rows = branching(seed, rows=4 + 3 * seed, longest=60 + 40 * seed)
    loss = loss_alone(model, rows)
    loss.backward()
    expected = gradients(model)
    assert backward(model, rows, backend, trees) == pytest.approx(float(loss.detach()), rel=1e-10)
    assert_equal_gradients(model, expected, 1e-10)


@pytest.mark.parametrize(("backend", "trees"), SHAPES)
def test_in_fp32_too(backend: str, trees: bool) -> None:
    model = grouped_model(dtype=torch.float32)
    rows = branching(11)
    loss_alone(model, rows).backward()
    expected = gradients(model)
    backward(model, rows, backend, trees)
    assert_equal_gradients(model, expected, 1e-5)


def test_scores_at_the_tokens_themselves() -> None:
    model = grouped_model()
    rows = branching(5)
    loss_alone(model, rows, on=True).backward()
    expected = gradients(model)
    backward(model, rows, "sdpa", trees=True, on=True)
    assert_equal_gradients(model, expected, 1e-10)


def test_long_segments_and_long_prefixes() -> None:
    model = grouped_model()
    rows = branching(3, rows=6, longest=700, fanout=1.0, trained=0.1)
    loss_alone(model, rows).backward()
    expected = gradients(model)
    backward(model, rows, "sdpa", trees=True)
    assert_equal_gradients(model, expected, 1e-10)


def test_recomputing_layers_changes_nothing() -> None:
    model, rows = grouped_model(), branching(4)
    backward(model, rows, "sdpa", trees=True)
    expected = gradients(model)
    thrifty = copy.deepcopy(model)
    if hasattr(thrifty, "activation_checkpointing_enable"):  # the name since transformers 5.23
        thrifty.activation_checkpointing_enable({"use_reentrant": False})
    else:
        thrifty.gradient_checkpointing_enable({"use_reentrant": False})
    backward(thrifty.train(), rows, "sdpa", trees=True)
    assert_equal_gradients(thrifty, expected, 1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it traces
@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 9])
def test_layers_compile_without_a_break(window: int | None) -> None:
    model = grouped_model(window=window)
    compiled = copy.deepcopy(model)
    for layer in decoder(compiled).layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        rows = branching(seed)
        backward(model, rows, "sdpa", trees=True)
        backward(compiled, rows, "sdpa", trees=True)
        assert_equal_gradients(compiled, gradients(model), 1e-12)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # a CPU without bf16
@torch.no_grad()
def test_half_precision_by_autocast_stays_near() -> None:
    model, rows = grouped_model(dtype=torch.float32), branching(6, trained=0.9)
    (make,) = micro_batches(Databuffer(rows), [], 10_000, device=CPU, trees=True)
    exact = hidden_states(model, make().layout, "sdpa")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = hidden_states(model, make().layout, "sdpa")
    assert float((exact - rough).abs().mean()) < 0.05 * float(exact.abs().mean())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("trees", [False, True])
def test_flex_sees_what_the_others_see(trees: bool) -> None:
    """Its kernels need a GPU; on the CPU torch computes only its forward pass."""
    model = grouped_model().requires_grad_(False)
    for make in micro_batches(Databuffer(branching(8, rows=6, longest=50)), [], 120, device=CPU, trees=trees):
        layout = make().layout
        torch.testing.assert_close(
            hidden_states(model, layout, "flex"), hidden_states(model, layout, "sdpa"), rtol=1e-10, atol=1e-10
        )


def other_models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaConfig(**small, intermediate_size=24, num_key_value_heads=2, attention_bias=True)
    judge = Qwen2Config(**small, intermediate_size=24, num_key_value_heads=2, num_labels=1, pad_token_id=0)
    gpt2 = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=256)
    return {
        "llama": LlamaForCausalLM(llama),
        "judge": Qwen2ForSequenceClassification(judge),
        "gpt2": GPT2LMHeadModel(gpt2),
    }


@pytest.mark.parametrize("name", ["llama", "judge", "gpt2"])
@pytest.mark.parametrize(("backend", "trees"), SHAPES)
def test_models_of_other_families(name: str, backend: str, trees: bool) -> None:
    model = exact_norms(other_models()[name].double().eval())
    rows = branching(9)
    loss_alone(model, rows).backward()
    expected = gradients(model)
    backward(model, rows, backend, trees)
    assert_equal_gradients(model, expected, 1e-10)


def test_other_uses_of_the_model_go_on_as_before() -> None:
    """A padded batch with a mask, as an engine would send it, before and after packed rows have gone through."""
    model = grouped_model()
    tokens = torch.randint(0, 32, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    before = model(input_ids=tokens, attention_mask=mask).logits
    backward(model, branching(0), "sdpa", trees=True)
    after = model(input_ids=tokens, attention_mask=mask).logits
    assert torch.equal(before, after)


def test_the_same_rows_give_the_same_bits() -> None:
    model, rows = grouped_model(dtype=torch.float32), branching(10)
    runs = []
    for _ in range(2):
        backward(model, rows, "sdpa", trees=True)
        runs.append(gradients(model))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert np.isfinite(float(runs[0]["model.embed_tokens.weight"].sum()))
