"""The engine of a policy: embedded, or a vLLM or SGLang server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rillflow.config.base import Positive, Seconds, Section


class ServerConfig(Section):
    """A vLLM or SGLang server: one that is started and supervised, or one that runs already."""

    url: str | None = Field(
        None, description="of a server that runs already; without it one is started, on loopback, and supervised"
    )
    python: str = Field(
        "python3", description="the interpreter that has vLLM or SGLang installed, where one is started"
    )
    arguments: list[str] = Field(default_factory=list, description="further arguments of the server's command line")
    environment: dict[str, str] = Field(default_factory=dict, description="variables added to its environment")
    tensor_parallel: Positive = Field(1, description="GPUs that one copy of the weights is spread over")
    memory: float = Field(0.4, gt=0, le=1, description="share of a GPU's memory that it may take")
    seeded: bool = Field(
        False,
        description="vLLM: draw by the requests' seeds, so that the same ones give the same answers; slower",
    )
    decodes_deltas: bool | None = Field(
        None,
        description="whether its workers decode deltas, on the device that holds the weights, or the node does, on its "
        "host; default: the workers, if the weights are on a GPU",
    )
    start_timeout: Seconds = Field(600.0, description="it must answer so long after it was started")


class EngineConfig(Section):
    kind: Literal["embedded", "vllm", "sglang"] = Field(
        "embedded", description="our own engine in the node's process, or a server of its own"
    )
    slots: Positive = Field(64, description="sequences decoded at once")
    context: Positive = Field(512, description="most tokens of one sequence, prompt and answer together")
    queue: Positive = Field(1024, description="most requests that wait for a slot")
    on_update: Literal["refill", "keep"] = Field(
        "refill",
        description="what becomes of the attention cache of running answers when new weights come: computed again "
        "under them, or kept as it is",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0 …")
    dtype: Literal["fp32", "bf16"] = "fp32"
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _fits(self) -> EngineConfig:
        if self.kind == "embedded" and self.server != ServerConfig():
            raise ValueError("engine.server is for engine.kind vllm or sglang")
        if self.kind == "sglang" and self.server.seeded:
            raise ValueError("engine.server.seeded is for engine.kind vllm")
        return self
