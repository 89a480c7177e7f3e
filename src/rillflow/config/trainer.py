"""The section of a recipe for a trainer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rillflow.config.algorithm import AlgorithmConfig
from rillflow.config.base import Beta, Name, NonNegative, Positive, Seconds, Section

_MOST_PROFILED = 20  # steps: a profile is held in memory until its last step


class NodeConfig(Section):
    """A node of a step graph. Written short, it is the name of its function or where that is (file.py:function)."""

    id: Name | None = Field(None, description="default: the function's name")
    role: Literal["actor", "critic", "reference", "reward"] | None = Field(None, description="default: the function's")
    kind: Literal["fetch", "generate", "infer", "compute", "train", "publish"] | None = Field(
        None, description="default: the function's"
    )
    function: str | None = Field(
        None, description="its name in the registry, module:function or file.py:function; default: that of (role, kind)"
    )
    needs: list[Name] | None = Field(
        None, description="ids of nodes that come before it; default: those that make the columns it reads"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of its function")
    ranks: Positive | None = Field(None, description="how many ranks hold the data while it runs; default: all")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _names_something(self) -> NodeConfig:
        if self.function is None and (self.role is None or self.kind is None):
            raise ValueError("a node needs a function, or a role and a kind")
        return self


class LoraConfig(Section):
    """Train low-rank adapters and publish only those."""

    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    targets: list[str] | Literal["all-linear"] = Field("all-linear", description="names of the layers that get one")


class TrainerConfig(AlgorithmConfig):
    """One trainer, of one policy."""

    steps: Positive = Field(100, description="optimizer steps of the whole run")
    batch_groups: Positive = Field(8, description="groups in a batch; a batch is one optimizer step")
    micro_tokens: Positive = Field(8192, description="most tokens of one forward pass")
    lr: Annotated[float, Field(gt=0)] = 1e-6
    warmup_steps: NonNegative = 0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = Field(
        1e-8, description="AdamW's; a larger one damps the steps of weights whose gradients are tiny"
    )
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="of the forward pass; masters are always fp32")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0 …")
    stream_groups: NonNegative = Field(
        0,
        description="serve a batch in parts of at least this many groups, as soon as they are ready, so that gradients "
        "accumulate while the rest is still played; 0 serves whole batches",
    )
    updates: Positive = Field(
        1, description="mini-batches, each with an optimizer update of its own, that a batch is split into by groups"
    )
    epochs: Positive = Field(1, description="passes over each batch")
    graph: list[NodeConfig] | None = Field(
        None, description="the nodes of a step, in place of the algorithm's own graph"
    )
    nodes: list[NodeConfig] = Field(
        default_factory=list, description="nodes of your own, added to the graph where their columns are made and read"
    )
    ranks: Positive = Field(1, description="processes that train this policy together")
    sharding: Literal["none", "fsdp"] = Field(
        "none", description="whether each rank holds the whole model, or a shard of it (FSDP2)"
    )
    attention: Literal["auto", "padded", "loops", "sdpa", "varlen", "flex"] = Field(
        "auto",
        description="padded runs any model; loops (CPU), sdpa, varlen (GPU) and flex (GPU) pack rows end to end, "
        "without padding",
    )
    trees: bool = Field(False, description="compute the common prefixes of a micro-batch's rows once")
    recompute: bool = Field(
        False, description="activation checkpointing, also of the head: less memory for a third more computing"
    )
    compile: bool = Field(False, description="torch.compile the model's layers (GPU)")
    head_tokens: Positive = Field(
        1024, description="tokens whose logits exist at once: the head runs in pieces of this size"
    )
    lora: LoraConfig | None = Field(None, description="train adapters instead of the model")
    publish_delay: Literal[0, 1] = Field(
        1, description="1: weights are written while the next step computes; 0: before it begins"
    )
    checkpoint_every: Positive = Field(10, description="optimizer steps between checkpoints")
    keep_checkpoints: Positive = 2
    batch_wait: Seconds = Field(600.0, description="longest wait for a batch before the run fails, saying why")
    profile: str | None = Field(
        None,
        pattern=r"^[1-9]\d*(-[1-9]\d*)?$",
        description="optimizer steps that torch's profiler looks at, such as `3-5`, at most 20; written to "
        "RUN/profiles/POLICY",
    )

    @model_validator(mode="after")
    def _fits(self) -> TrainerConfig:
        if self.graph is not None and self.nodes:
            raise ValueError("give `graph` (all nodes) or `nodes` (added to the algorithm's own), not both")
        if self.updates > self.batch_groups:
            raise ValueError("updates cannot be more than batch_groups: each update needs a group")
        if self.lora is not None and self.sharding == "fsdp":
            raise ValueError("lora needs sharding: none")
        if self.profile is not None:
            first, _, last = self.profile.partition("-")
            if not 0 <= int(last or first) - int(first) < _MOST_PROFILED:
                raise ValueError(f"profile: {self.profile} must be one to {_MOST_PROFILED} steps, the first one first")
        return self
