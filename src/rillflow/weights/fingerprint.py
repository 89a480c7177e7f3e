"""Fingerprints of tensors: sums of 64 bits that follow a change without another look at what did not change.

The tensor's bytes (little-endian, C order) in words of 8 bytes w_0, w_1, …, the last one padded with zeros, give
sum_j mix(w_j + (j + 1) * 0x9E3779B97F4A7C15) modulo 2**64, where mix is the finalizer of splitmix64. So a part that
begins at a multiple of 8 bytes has a partial sum, and partial sums add up, whichever process computed them.

It does not protect against other weights that were made with the same sum on purpose. The hashes and the signature of
the manifest do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rillflow import kernels
from rillflow.contracts import Change
from rillflow.errors import WeightsError
from rillflow.kernels import delta as codec
from rillflow.kernels.delta import reference

_MODULUS = 1 << 64
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor, first_word: int = 0) -> int:
    """Return the fingerprint of a tensor, or the partial sum of its part that begins at the word `first_word`."""
    if tensor.is_cuda and kernels.enabled("delta_gpu"):
        from rillflow.kernels.delta import gpu

        return gpu.fingerprint_gpu(tensor, first_word)
    words_W, rest_W = _words(tensor.cpu())
    return (codec.total(words_W, first_word) + codec.total(rest_W, first_word + len(words_W))) % _MODULUS


def fingerprints(parts: Sequence[tuple[torch.Tensor, int]]) -> list[int]:
    """`fingerprint` of each tensor with its first word; a GPU is waited for once."""
    if parts and kernels.enabled("delta_gpu") and all(tensor.is_cuda for tensor, _ in parts):
        from rillflow.kernels.delta import gpu

        return gpu.fingerprints_gpu(parts)
    return [fingerprint(tensor, first_word) for tensor, first_word in parts]


def plain(tensor: torch.Tensor, first_word: int = 0) -> int:
    """Return the same several times slower, but at once: it needs no compiled loops, which take seconds to load."""
    if tensor.is_cuda:
        return fingerprint(tensor, first_word)
    words_W, rest_W = _words(tensor)
    return (reference.total(words_W, first_word) + reference.total(rest_W, first_word + len(words_W))) % _MODULUS


def gained(base: torch.Tensor, new: torch.Tensor, first_word: int = 0) -> int:
    """Return the change of a fingerprint, modulo 2**64, when `base` becomes `new`, of the same dtype and shape."""
    if base.dtype != new.dtype or base.shape != new.shape:
        raise WeightsError(
            f"a tensor was {base.dtype} {tuple(base.shape)} and is {new.dtype} {tuple(new.shape)}",
            "compare tensors of the same dtype and shape",
        )
    if base.is_cuda:
        return (fingerprint(new, first_word) - fingerprint(base, first_word)) % _MODULUS
    (old_W, old_rest_W), (new_W, new_rest_W) = _words(base), _words(new)
    found = codec.gained(old_W, new_W, first_word)
    return (found + codec.gained(old_rest_W, new_rest_W, first_word + len(old_W))) % _MODULUS


def moved(fingerprint_before: int, base: torch.Tensor, change: Change, first_word: int = 0) -> int:
    """What a fingerprint becomes when `change` is applied to `base`, the tensor or the part that begins at
    `first_word`. It takes time for what changes, and does not touch `base`."""
    if change.index_K is None:
        _check(base, change, base.numel())
        return (fingerprint_before + fingerprint(change.value_K, first_word) - fingerprint(base, first_word)) % _MODULUS
    _check(base, change, change.index_K.numel())
    index_K = change.index_K.numpy()
    if len(index_K) and not 0 <= index_K[0] <= index_K[-1] < base.numel():
        raise WeightsError(f"a change names a weight outside of {base.numel()}", "it belongs to another tensor")
    gained = codec.difference(bits_of(base), index_K, bits_of(change.value_K), first_word)
    return (fingerprint_before + gained) % _MODULUS


def bits_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The items of a tensor on the host as unsigned integers, flat: its own memory if it is contiguous."""
    same_size = _SAME_SIZE.get(tensor.dtype.itemsize)
    if same_size is None:
        raise WeightsError(f"a tensor of {tensor.dtype} has no fingerprint", "its items have more than 8 bytes")
    if tensor.dim() != 1 or tensor.requires_grad or not tensor.is_contiguous():
        tensor = tensor.detach().contiguous().reshape(-1)
    return tensor.view(same_size).numpy().view(f"u{tensor.dtype.itemsize}")


def _words(tensor: torch.Tensor) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The whole words of a tensor on the host, and the padded one behind them, if there is one."""
    data = bits_of(tensor).view(np.uint8)
    whole = len(data) // 8 * 8
    rest = data[whole:].tobytes()
    rest_W = np.frombuffer(bytearray(rest.ljust(8, b"\0") if rest else b""), np.uint64)
    return data[:whole].view(np.uint64), rest_W


def _check(base: torch.Tensor, change: Change, count: int) -> None:
    if change.value_K.dtype != base.dtype or change.value_K.numel() != count:
        raise WeightsError(
            f"a change has {change.value_K.numel()} weights of {change.value_K.dtype} for {count} of {base.dtype}",
            "it belongs to another tensor",
        )
