"""Bit-exact deltas of one tensor against its base. `format` documents the bytes, the contract of all encoders."""

from rillflow.weights.delta.entropy import bound
from rillflow.weights.delta.file import apply, apply_, decode, encode
from rillflow.weights.delta.format import DTYPES, Encoded

__all__ = ["DTYPES", "Encoded", "apply", "apply_", "bound", "decode", "encode"]
