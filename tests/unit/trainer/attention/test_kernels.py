"""Kernels of spans against attention written out; the one of GPUs where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packed_helpers import branching, grouped_model

from rillflow.trainer.attention import hidden_states
from rillflow.trainer.attention.forest import KERNELS, PATHS, joined, subtree_ends
from rillflow.trainer.attention.kernels import Heads
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.packing import Layout, micro_batches

SCALE = 0.3


def layout_of(seed: int, device: torch.device, **options: int) -> Layout:
    (make,) = micro_batches(Databuffer(branching(seed, **options)), [], 1 << 20, device=device, trees=True)
    return make().layout


def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Softmax over all tokens that a token may see."""
    end_P = torch.from_numpy(np.repeat(subtree_ends(layout), layout.length_S)).to(query.device)
    at_P = torch.arange(len(query), device=query.device)
    seen_PP = (at_P[None] <= at_P[:, None]) & (at_P[:, None] < end_P[None])
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen_PP, -torch.inf).softmax(-1), value)


def inputs(layout: Layout, heads: tuple[int, int], size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(layout.tokens_P), count, size) for count in (heads[0], heads[1], heads[1])]
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [part.to(layout.tokens_P.device, dtype).requires_grad_() for part in made]


def assert_like_written_out(layout: Layout, kernel: str, dtype: torch.dtype, tolerance: float) -> None:
    """Compare with fp64. Sums of some hundred terms in any order are about 100 roundings off at most: of 1e-16 in fp64,
    of 6e-8 in fp32, and of 4e-3 in bf16, where only the inputs and the result are rounded."""
    ours, exact = inputs(layout, (4, 2), 16, dtype), inputs(layout, (4, 2), 16, dtype)
    exact = [part.detach().double().requires_grad_() for part in exact]
    out, expected = joined(layout, kernel)(Heads(*ours), SCALE), written_out(*exact, layout)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    pull = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pull = pull.to(expected.device)
    out.backward(pull.to(dtype))
    expected.backward(pull)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("kernel", [PATHS, "plain"])
@pytest.mark.parametrize("seed", range(4))
def test_kernels_of_the_cpu(kernel: str, seed: int) -> None:
    layout = layout_of(seed, torch.device("cpu"), rows=10, longest=100 + 100 * seed)
    assert (layout.parent_S >= 0).any()
    assert_like_written_out(layout, kernel, torch.float64, 1e-10)


def test_long_segments_are_cut_and_few_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.trainer.attention.paths._BLOCK", 7)
    monkeypatch.setattr("rillflow.trainer.attention.paths._AT_ONCE", 64)
    assert_like_written_out(layout_of(1, torch.device("cpu")), PATHS, torch.float64, 1e-10)


def test_plain_products_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.trainer.attention.kernels._SCORES", 3000)
    assert_like_written_out(layout_of(1, torch.device("cpu")), "plain", torch.float64, 1e-10)


def test_half_precision_on_the_cpu() -> None:
    assert_like_written_out(layout_of(2, torch.device("cpu")), PATHS, torch.bfloat16, 0.03)


def test_every_backend_names_a_kernel() -> None:
    assert set(KERNELS) == {"plain", "flash", "cudnn"}


@pytest.mark.needs("cuda")
@pytest.mark.parametrize("seed", range(3))
def test_flash_on_the_gpu(seed: int) -> None:
    layout = layout_of(seed, torch.device("cuda"), rows=20, longest=600)
    assert_like_written_out(layout, "flash", torch.bfloat16, 0.03)
    assert_like_written_out(layout, "plain", torch.float32, 1e-4)


@pytest.mark.needs("cuda")
@pytest.mark.parametrize("rows", [1, 20])
def test_cudnn_on_the_gpu(rows: int) -> None:
    assert_like_written_out(layout_of(0, torch.device("cuda"), rows=rows, longest=600), "cudnn", torch.bfloat16, 0.03)


@pytest.mark.needs("cuda")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it traces
@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_backends_of_the_gpu_agree_with_plain_products(backend: str) -> None:
    """All in bf16, where two ways to compute the same thing differ by roundings that layers add up."""
    layout = layout_of(5, torch.device("cuda"), rows=20, longest=600)
    found: list[dict[str, torch.Tensor]] = []
    for name in ("sdpa", backend):
        model = grouped_model(dtype=torch.float32, head_dim=16).cuda().bfloat16()
        hidden = hidden_states(model, layout, name).float()
        # Not their squares: the squares of a norm's output always have the same sum.
        (hidden * torch.linspace(-1, 1, hidden.numel(), device="cuda").view_as(hidden)).sum().backward()
        gradients = {key: p.grad.float() for key, p in model.named_parameters() if p.grad is not None}
        found.append({"hidden": hidden.detach()} | gradients)
    plain, theirs = found
    for key, value in plain.items():
        apart = float((value - theirs[key]).norm() / value.norm())
        assert apart < 0.15, (key, apart)
