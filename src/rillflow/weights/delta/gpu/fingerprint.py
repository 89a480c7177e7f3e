"""The fingerprint of a tensor on the device: the same number as `weights.fingerprint` gives on the host."""

from __future__ import annotations

import torch

from rillflow.weights.delta.gpu import compare
from rillflow.weights.delta.gpu.batch import BLOCK, WORD, words_of

_ROUNDS = 4


def fingerprint_gpu(tensor: torch.Tensor, first_word: int = 0) -> int:
    """Of a tensor of any dtype, or of a part of one that begins at its word `first_word`."""
    out = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    words = words_of(tensor)
    if number := -(-tensor.nbytes // WORD):
        grid = (-(-number // (BLOCK * _ROUNDS)),)
        compare.fingerprint[grid](words.data_ptr(), number, first_word, out, WORDS=BLOCK, ROUNDS=_ROUNDS)
    return int(out.item()) & (1 << 64) - 1
