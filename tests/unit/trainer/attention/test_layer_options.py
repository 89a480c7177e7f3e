"""Sliding windows, capped scores and attention sinks in packs and trees, against the library's masks of rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from packed_helpers import CPU, branching, directions, exact_norms, gradients, loss_alone, loss_packed, rows_of
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import eager_mask

from rillflow.errors import ConfigError
from rillflow.trainer.attention import hidden_states, paths
from rillflow.trainer.attention.forest import PATHS, flex, joined, packed, subtree_ends
from rillflow.trainer.attention.kernels import Heads, Options
from rillflow.trainer.batches import Databuffer, Rows
from rillflow.trainer.packing import Layout, micro_batches

SCALE, SOFTCAP = 0.3, 1.5
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GEMMA: dict[str, Any] = SMALL | {"query_pre_attn_scalar": 8, "layer_types": KINDS}


def written_out(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one row in the model's own dtype, with the mask that the library made."""
    heads = query.shape[1]
    key, value = (part.repeat_interleave(heads // key.shape[1], 1) for part in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2), None


AttentionInterface.register("written_out", written_out)
AttentionMaskInterface.register("written_out", eager_mask)


def gemma2(window: int) -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**GEMMA, sliding_window=window, attn_logit_softcapping=SOFTCAP))


def gemma3(window: int) -> PreTrainedModel:
    return Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA, sliding_window=window))


def gpt_oss(window: int) -> PreTrainedModel:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**SMALL, **experts, layer_types=KINDS, sliding_window=window))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, 1.0)
    model.set_experts_implementation("eager")  # the others have no fp64
    return model


def mistral(window: int) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=window))


def qwen3(window: int) -> PreTrainedModel:
    config = Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=window, layer_types=KINDS)
    return Qwen3ForCausalLM(config)


MODELS: dict[str, Callable[[int], PreTrainedModel]] = {
    "gemma2": gemma2, "gemma3": gemma3, "gpt_oss": gpt_oss, "mistral": mistral, "qwen3": qwen3
}  # fmt: skip


def exact(name: str, window: int) -> PreTrainedModel:
    torch.manual_seed(0)
    return exact_norms(MODELS[name](window).double().eval())


# ---------------------------------------------------------------- models


def assert_like_rows_alone(name: str, window: int, rows: Rows, trees: bool) -> None:
    """Compare the loss and all gradients with those of each row alone, by the library's masks, in fp64."""
    model = exact(name, window)
    model.set_attn_implementation("written_out")
    expected_loss = loss_alone(model, rows)
    expected_loss.backward()
    expected = gradients(model)
    model.zero_grad()
    weight_ND = directions(rows, model.config.hidden_size, model.dtype)
    loss = torch.zeros((), dtype=model.dtype)
    for make in micro_batches(Databuffer(rows), [], 400, device=CPU, trees=trees):
        micro = make()
        loss = loss + loss_packed(hidden_states(model, micro.layout, "sdpa"), micro, weight_ND)
    loss.backward()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        apart = float((found[key] - gradient).abs().max())
        assert apart <= 1e-10 * max(float(gradient.abs().max()), 1.0), (key, apart)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("window", "trees"), [(9, False), (9, True), (500, True)])
def test_gradients_are_those_of_each_row_alone(name: str, window: int, trees: bool) -> None:
    assert_like_rows_alone(name, window, branching(1, rows=8), trees)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("window", [1, 19, 20, 21, 29, 30, 31])
def test_windows_as_long_as_rows_and_what_they_share(window: int, trees: bool) -> None:
    """Two rows of 30 tokens that share 20 of them, and one of 20."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, 32, 20).tolist()
    rows = rows_of([common, *([*common, first, *rng.integers(0, 32, 9).tolist()] for first in (3, 4))])
    assert_like_rows_alone("qwen3", window, rows, trees)


def test_blocks_of_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are cut, and a block sees tokens of the blocks and of the segments before it."""
    monkeypatch.setattr("rillflow.trainer.attention.paths._BLOCK", 8)
    monkeypatch.setattr("rillflow.trainer.attention.written._BLOCK", 8)
    for name, window in (("gemma2", 13), ("gpt_oss", 5), ("mistral", 8)):
        assert_like_rows_alone(name, window, branching(2, rows=8), trees=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@torch.no_grad()
def test_flex_sees_what_the_others_see() -> None:
    """On the CPU torch computes only its forward pass."""
    model, layout = exact("gemma2", 9).requires_grad_(False), layout_of(8)
    torch.testing.assert_close(
        hidden_states(model, layout, "flex"), hidden_states(model, layout, "sdpa"), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_other_uses_of_the_model_go_on_as_before(name: str) -> None:
    """The library's own attention for a padded batch, to the bit, after packed rows have gone through."""
    torch.manual_seed(0)
    model = MODELS[name](4).eval()
    tokens, mask = torch.randint(3, 32, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    before = model(input_ids=tokens, attention_mask=mask).logits
    (make,) = micro_batches(Databuffer(branching(0)), [], 1 << 20, device=CPU)
    hidden_states(model, make().layout, "sdpa")
    assert torch.equal(before, model(input_ids=tokens, attention_mask=mask).logits)


# ---------------------------------------------------------------- kernels


def layout_of(seed: int, *, trees: bool = True) -> Layout:
    (make,) = micro_batches(Databuffer(branching(seed, rows=10)), [], 1 << 20, device=CPU, trees=trees)
    return make().layout


def attended(heads: Heads, layout: Layout, options: Options) -> torch.Tensor:
    """Attention written out over all packed tokens."""
    end_P = torch.from_numpy(np.repeat(subtree_ends(layout), layout.length_S))
    at_P, place_P = torch.arange(len(end_P)), layout.position_P
    seen_PP = (at_P[None] <= at_P[:, None]) & (at_P[:, None] < end_P[None])
    if options.window is not None:
        seen_PP &= place_P[:, None] - place_P[None] < options.window
    mask = torch.zeros(seen_PP.shape, dtype=torch.float64).masked_fill(~seen_PP, -torch.inf)
    query, key, value = (part.transpose(0, 1)[None] for part in heads)
    asked = {"scaling": SCALE, "softcap": options.softcap, "s_aux": options.sinks}
    out, _ = written_out(torch.nn.Module(), query, key, value, mask, **asked)
    return out[0]


def assert_like_attended(kernel: str, layout: Layout, options: Options) -> None:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(len(layout.tokens_P), heads, 8, generator=generator).double() for heads in (4, 2, 2)]
    sinks = options.sinks
    both = []
    for compute in (joined(layout, kernel, options.window), lambda heads, _, asked: attended(heads, layout, asked)):
        heads = Heads(*(part.clone().requires_grad_() for part in made))
        own = options if sinks is None else options._replace(sinks=sinks.clone().requires_grad_())
        out = compute(heads, SCALE, own)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double())
        both.append([out.detach(), *(part.grad for part in (*heads, own.sinks) if part is not None)])
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", [PATHS, "plain"])
def test_sinks_are_joined_to_every_kernel(kernel: str) -> None:
    assert_like_attended(kernel, layout_of(0), Options(sinks=torch.tensor([-30.0, 0.0, 2.0, 30.0]).double()))


@pytest.mark.parametrize("window", [None, 7, 64])
@pytest.mark.parametrize("softcap", [None, SOFTCAP])
def test_products_of_devices_without_a_kernel(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None
) -> None:
    monkeypatch.setattr(paths, "_has_kernel", lambda query, softcap: False)
    monkeypatch.setattr("rillflow.trainer.attention.written._BLOCK", 11)
    for trees in (False, True):
        layout = layout_of(1, trees=trees)
        assert_like_attended(PATHS, layout, Options(window, softcap, torch.zeros(4).double()))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_with_all_options() -> None:
    window = 7
    layout, generator = layout_of(3), torch.Generator().manual_seed(0)
    heads = Heads(*(torch.randn(len(layout.tokens_P), count, 8, generator=generator).double() for count in (4, 2, 2)))
    options = Options(window, SOFTCAP, torch.tensor([-1.0, 0.0, 1.0, 2.0]).double())
    found = flex(layout, window)(heads, SCALE, options)
    torch.testing.assert_close(found, attended(heads, layout, options), rtol=1e-10, atol=1e-10)


def test_a_window_that_no_row_exceeds_costs_nothing() -> None:
    layout = layout_of(0)
    longest = int(layout.position_P.max()) + 1
    asked: list[int | None] = []

    def make(window: int | None) -> Any:
        asked.append(window)
        return joined(layout, PATHS, window)

    of = packed(layout, {None, longest, longest + 1}, make)
    assert asked == [None]
    assert of.by_window[None] is of.by_window[longest] is of.by_window[longest + 1]
    asked.clear()
    packed(layout, {None, longest - 1}, make)
    assert set(asked) == {None, longest - 1}


def test_a_long_row_with_a_window_copies_few_keys() -> None:
    (make,) = micro_batches(Databuffer(rows_of([[1] * 3000])), [], 1 << 20, device=CPU)
    tables = paths.tables(make().layout, 100)
    keys, masks = tables[1::4], tables[3::4]
    assert sum(part.numel() for part in keys) < 3000 * (256 + 99) / 256 + 1
    assert len({id(mask) for mask in masks}) <= 3


def test_windows_that_no_table_was_made_for_are_refused() -> None:
    layout = layout_of(0)
    heads = Heads(*(torch.zeros(len(layout.tokens_P), 2, 8) for _ in range(3)))
    of = packed(layout, {None}, lambda window: joined(layout, PATHS, window))
    with pytest.raises(ConfigError, match="window of 5"):
        of(heads, SCALE, Options(window=5))
    with pytest.raises(ConfigError, match="trees"):
        joined(layout, "flash", 5)
