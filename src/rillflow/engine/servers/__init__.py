"""Engines that are servers of their own: vLLM, reached through a channel opened inside it, and SGLang, over HTTP.

base        the life of an engine that is a server, and the order of its updates; calls: its answers
weights     the weights in a server's workers, and updates of them; in_place: servers that change them in place
process     a server's process
vllm        the engine; vllm_server: its command line, our end of the channel; sglang and sglang_server likewise
inside      the modules that run inside the processes of the servers
"""

from rillflow.engine.servers.base import ServerEngine
from rillflow.engine.servers.calls import Part
from rillflow.engine.servers.weights import ModelFacts, Tainted, Update

__all__ = ["ModelFacts", "Part", "ServerEngine", "Tainted", "Update"]
