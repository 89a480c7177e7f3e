"""Bit-exact deltas of one tensor against its base. `file` documents the format: it is the contract of all encoders."""

from rillflow.weights.delta.entropy import bound
from rillflow.weights.delta.file import apply, apply_, encode

__all__ = ["apply", "apply_", "bound", "encode"]
