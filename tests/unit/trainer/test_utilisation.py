"""Model FLOPs utilisation: the work that is counted, against torch's own counter, and the peaks of devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trainer_helpers import small_model

from rillflow.trainer import utilisation
from rillflow.trainer.packing import Layout, MicroBatch
from rillflow.trainer.utilisation import Work, known_peak, pairs, peak


def a_row(length: int, trained: int) -> MicroBatch:
    """One row, of whose tokens the last are trained."""
    at = torch.arange(length)
    layout = Layout(at, at, np.array([0]), np.array([length]), np.array([-1]))
    some = at[length - trained :]
    return MicroBatch(layout, some, some, some, 1, {}, some.numpy(), some.numpy(), some.numpy())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_work_of_a_pass_is_what_torch_counts(tied: bool, frozen: bool) -> None:
    length, model = 12, small_model(tied=tied)
    model.set_attn_implementation("eager")
    if frozen:
        model.model.layers.requires_grad_(False)
    micro, work = a_row(length, length), Work(model)
    embedded = model.get_input_embeddings()(micro.layout.tokens_P).detach().requires_grad_()
    with FlopCounterMode(display=False) as forward:
        scores = model(inputs_embeds=embedded[None]).logits
    with FlopCounterMode(display=False) as backward:
        scores.sum().backward()
    # Eager attention computes the whole square of scores; the lower half is all that a token can see.
    unseen = 4 * 2 * 2 * 8 * (length**2 - pairs(micro.layout))  # layers, heads, size of a head
    assert work.forward(micro) == forward.get_total_flops() - unseen
    assert work.backward(micro) == backward.get_total_flops() - 2 * unseen


def test_the_output_layer_counts_for_trained_tokens_only() -> None:
    model = small_model()
    head = model.get_output_embeddings().weight.numel()
    assert Work(model).forward(a_row(12, 12)) - Work(model).forward(a_row(12, 5)) == 2 * head * 7


def test_a_shared_prefix_counts_once() -> None:
    tokens = torch.arange(10)
    # Four tokens, then two and four that go on after them.
    tree = Layout(tokens, tokens, np.array([0, 4, 6]), np.array([4, 2, 4]), np.array([-1, 0, 0]))
    assert pairs(tree) == (1 + 2 + 3 + 4) + (5 + 6) + (5 + 6 + 7 + 8)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_peaks_of_gpus_by_their_names(name: str, tera: float | None) -> None:
    assert known_peak(name) == (None if tera is None else tera * 1e12)


def test_the_peak_of_a_processor_is_measured_once() -> None:
    cpu = torch.device("cpu")
    assert peak(cpu, torch.float32) > 1e8
    assert peak(cpu, torch.float32) == peak(cpu, torch.float32)


def test_slow_products_are_measured_with_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def cubic(matrix: torch.Tensor) -> float:
        sizes.append(len(matrix))
        return float(2 * len(matrix) ** 3) / 1e9

    monkeypatch.setattr(utilisation, "_seconds", cubic)
    assert utilisation._measured.__wrapped__(torch.device("cpu"), torch.bfloat16) == pytest.approx(1e9)
    assert set(sizes) == {64, 128}, "a product of 128 rows takes 4 ms at that speed"
