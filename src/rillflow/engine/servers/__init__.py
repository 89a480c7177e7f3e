"""What engines share that are a server of their own (vLLM, SGLang)."""

from rillflow.engine.servers.base import Part, ServerEngine, Tainted, Update
from rillflow.engine.servers.facts import ModelFacts

__all__ = ["ModelFacts", "Part", "ServerEngine", "Tainted", "Update"]
