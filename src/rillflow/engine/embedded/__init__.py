"""The embedded engine: continuous batching on torch, for CPUs and single GPUs."""

from rillflow.engine.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
