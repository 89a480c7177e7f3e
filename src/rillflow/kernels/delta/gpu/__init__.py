"""Deltas of tensors on a CUDA device, written by Triton kernels: the same format as on the host, and the same numbers.

They are for publishers: a trainer's weights stay on its GPU, and only the coded changes leave it. A version of SmolLM2
takes its trainer 0.05 s on an H200 (`bench/results/async_gpu-h200.json`), beside steps of 0.42 s. Servers decode them
by torch alone (`engine.servers.inside.rillflow_delta`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rillflow.kernels.delta.gpu import compare
from rillflow.kernels.delta.gpu.batch import BLOCK, WORD, words_of
from rillflow.kernels.delta.gpu.encode import encode_gpu, encode_many

__all__ = ["encode_gpu", "encode_many", "fingerprint_gpu", "fingerprints_gpu"]

_ROUNDS = 4
_MASK = (1 << 64) - 1


def fingerprint_gpu(tensor: torch.Tensor, first_word: int = 0) -> int:
    """Return the fingerprint of a tensor of any dtype, or of its part that begins at the word `first_word`: the same
    number as `weights.fingerprint` gives on the host."""
    return fingerprints_gpu([(tensor, first_word)])[0]


def fingerprints_gpu(parts: Sequence[tuple[torch.Tensor, int]]) -> list[int]:
    """The same of many, on one device, which is waited for once."""
    if not parts:
        return []
    out = torch.zeros(len(parts), dtype=torch.int64, device=parts[0][0].device)
    words = [words_of(tensor) for tensor, _ in parts]  # copies among them live until the end
    for place, (tensor, first_word) in enumerate(parts):
        if number := -(-tensor.nbytes // WORD):
            grid = (-(-number // (BLOCK * _ROUNDS)),)
            to = out[place:]
            compare.fingerprint[grid](words[place].data_ptr(), number, first_word, to, WORDS=BLOCK, ROUNDS=_ROUNDS)
    return [found & _MASK for found in out.tolist()]
