"""The fingerprint of a tensor on the device: the same number as `weights.fingerprint` gives on the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rillflow.weights.delta.gpu.batch import BLOCK, WORD, words_of
from rillflow.weights.delta.gpu.words import mixed, words_at

_ROUNDS = 4


@triton.jit(do_not_specialize=["words", "number", "first_word"])
def _fingerprint(words, number, first_word, out, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    words = words.to(tl.int64)
    sums = tl.zeros([BLOCK], tl.int64)
    for step in tl.static_range(ROUNDS):
        at = start + step * BLOCK + tl.arange(0, BLOCK)
        sums += mixed(words_at(words, at, number, 1), first_word + at, at < number)
    tl.atomic_add(out, tl.sum(sums), sem="relaxed")


def fingerprint_gpu(tensor: torch.Tensor, first_word: int = 0) -> int:
    """Of a tensor of any dtype, or of a part of one that begins at its word `first_word`."""
    out = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    words = words_of(tensor)
    if number := -(-tensor.nbytes // WORD):
        grid = (-(-number // (BLOCK * _ROUNDS)),)
        _fingerprint[grid](words.data_ptr(), number, first_word, out, BLOCK=BLOCK, ROUNDS=_ROUNDS)
    return int(out.item()) & (1 << 64) - 1
