"""The common part of engines that are servers (vLLM, SGLang)."""

from rillflow.engine.servers.base import ServerEngine
from rillflow.engine.servers.calls import Part
from rillflow.engine.servers.facts import ModelFacts, Tainted
from rillflow.engine.servers.updates import Update

__all__ = ["ModelFacts", "Part", "ServerEngine", "Tainted", "Update"]
