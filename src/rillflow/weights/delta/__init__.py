"""Bit-exact deltas of one tensor against its base. `kernels.delta.format` documents the bytes."""

from rillflow.kernels.delta.format import DTYPES, Encoded
from rillflow.weights.delta.tensors import apply, apply_, decode, encode

__all__ = ["DTYPES", "Encoded", "apply", "apply_", "decode", "encode"]
