"""Model FLOPs utilisation (MFU): the share of its devices' peak arithmetic that a trainer uses.

The work is counted as in the PaLM report: two operations for each weight and token in the forward pass, four in the
backward pass (two if the weight is frozen), and attention by the pairs of tokens that see each other. The output layer
counts for trained tokens only, a mixture's experts as far as a token uses them. Recomputation, embeddings, norms, the
optimizer and attention that is not full do not count.

The peak is that of the device's data sheet in its 16-bit type without sparsity. For other devices, CPUs and passes in
fp32 the peak is the measured speed of a matrix product.
"""

from __future__ import annotations

import re
import time
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rillflow.trainer.packing import Layout, MicroBatch

# Dense operations per second in bf16 (fp16 if the device has no bf16), by words of the device's name; the first match
# counts.
PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A6000": 155e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI300X": 1307e12,
}
_SMALLEST, _LARGEST = 64, {"cuda": 4096, "cpu": 512}  # rows of the matrices whose product is timed
_LONG = 2e-3  # seconds of a product after which no larger one is timed: a CPU without bf16 needs seconds for 512 rows
_TIMES = 8


class Work:
    """The operations that a model's passes need."""

    def __init__(self, model: torch.nn.Module) -> None:
        whole: Any = getattr(model, "config", None)
        config = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
        embedding, head = _weight(model, "get_input_embeddings"), _weight(model, "get_output_embeddings")
        used = _used_experts(config)
        self._body = self._trained = 0.0  # weights that every token uses, and those of them that train
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and weight is not embedding and weight is not head:
                size = weight.numel() * getattr(weight, "ranks", 1) * (used if "experts" in name else 1.0)
                self._body += size
                self._trained += size if weight.requires_grad else 0.0
        self._head = 0.0 if head is None else float(head.numel())
        self._head_trained = self._head if head is not None and head.requires_grad else 0.0
        self._pair = _operations_of_a_pair(config)

    def forward(self, micro: MicroBatch) -> float:
        return 2 * self._weights(micro, self._body, self._head) + self._pair * pairs(micro.layout)

    def backward(self, micro: MicroBatch) -> float:
        """Return the operations for gradients of all layers' inputs and of the weights that train."""
        trained = 2 * self._weights(micro, self._trained, self._head_trained)
        return self.forward(micro) + self._pair * pairs(micro.layout) + trained

    @staticmethod
    def _weights(micro: MicroBatch, body: float, head: float) -> float:
        return body * len(micro.layout.tokens_P) + head * len(micro.target_T)


def _weight(model: torch.nn.Module, getter: str) -> torch.Tensor | None:
    get: Any = getattr(model, getter, lambda: None)
    found = getattr(get(), "weight", None)
    return found if isinstance(found, torch.Tensor) else None


def _used_experts(config: Any) -> float:
    """Return the share of a mixture's experts that a token uses; 1 for a model without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    there = next((found for name in names if (found := getattr(config, name, None))), None)
    used = getattr(config, "num_experts_per_tok", None)
    return float(used / there) if there and used else 1.0


def _operations_of_a_pair(config: Any) -> float:
    """Return the forward operations for two tokens that see each other: a score and a weighted value in each head."""
    kinds = set(getattr(config, "layer_types", None) or ())
    heads, layers = getattr(config, "num_attention_heads", 0), getattr(config, "num_hidden_layers", 0)
    if not heads or kinds - {"full_attention"}:
        return 0.0
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 4.0 * float(layers * heads * size)


def pairs(layout: Layout) -> float:
    """Return the number of pairs of tokens that see each other: each token sees itself and all before it in its row."""
    depth_S = np.zeros(len(layout.length_S))
    for segment in np.flatnonzero(layout.parent_S >= 0):
        parent = layout.parent_S[segment]
        depth_S[segment] = depth_S[parent] + layout.length_S[parent]
    length_S = layout.length_S.astype(np.float64)
    return float((length_S * depth_S + length_S * (length_S + 1) / 2).sum())


def peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the most operations per second of a device."""
    known = known_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" and dtype != torch.float32 else None
    return _measured(device, dtype) if known is None else known


def known_peak(name: str) -> float | None:
    """Return the 16-bit peak of the GPU of this name, None if it is not in the table."""
    return next((value for words, value in PEAKS.items() if re.search(rf"\b{words}\b", name)), None)


@lru_cache
def _measured(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a matrix product, the fastest of several.

    Its size is doubled up to the device's largest, or until a product takes long.
    """
    size, largest = _SMALLEST, _LARGEST.get(device.type, _LARGEST["cuda"])
    while True:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        best = min(_seconds(matrix) for _ in range(_TIMES))
        if size == largest or best > _LONG:
            return 2.0 * size**3 / best
        size *= 2


def _seconds(matrix: torch.Tensor) -> float:
    """Return the seconds of the matrix's product with itself."""
    started = time.perf_counter()
    torch.mm(matrix, matrix)[0, 0].item()  # waits for the device
    return time.perf_counter() - started
