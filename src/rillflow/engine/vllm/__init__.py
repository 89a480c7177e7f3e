"""vLLM as an engine: a server of its own, reached through a channel that is opened inside it."""

from rillflow.engine.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
