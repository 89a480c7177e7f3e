"""The embedded engine: continuous batching on torch, for CPUs and single GPUs."""

from rillflow.engine.embedded.engine import EmbeddedEngine
from rillflow.engine.embedded.model import load_model

__all__ = ["EmbeddedEngine", "load_model"]
