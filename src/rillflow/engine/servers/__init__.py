"""What engines share that are a server of their own (vLLM, SGLang)."""

from rillflow.engine.servers.base import ServerEngine
from rillflow.engine.servers.calls import Part
from rillflow.engine.servers.facts import ModelFacts
from rillflow.engine.servers.layout import Tainted
from rillflow.engine.servers.updates import Update

__all__ = ["ModelFacts", "Part", "ServerEngine", "Tainted", "Update"]
