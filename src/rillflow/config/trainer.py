"""A trainer: its algorithm with options, its step graph and its optimizer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rillflow.config.base import Beta, Name, NonNegative, Positive, Seconds, Section

_AdvantageName = Literal[
    "grpo", "grpo_whitened", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]  # fmt: skip
_AggregationName = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
_Factor = Annotated[float, Field(gt=0)]
_CLIPPED = frozenset({"ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
# Which algorithms have an option; those not listed are for all.
_OPTION_OF: dict[str, frozenset[str]] = {
    "clip_low": _CLIPPED | {"gspo", "cispo", "m2po", "decoupled_ppo"},
    "clip_high": _CLIPPED | {"gspo", "cispo", "m2po", "decoupled_ppo"},
    "clip_dual": _CLIPPED | {"m2po"},
    "sapo_tau": frozenset({"sapo"}),
    "m2_threshold": frozenset({"m2po"}),
    "m2_variant": frozenset({"m2po"}),
    "weight_bound": frozenset({"reinforce", "decoupled_ppo"}),
    "weight_level": frozenset({"reinforce"}),
    "critic": frozenset({"ppo"}),
}


class CriticConfig(Section):
    """PPO's critic: a model of its own that learns the value of every token."""

    model: str | None = Field(None, description="what it starts from; default: the policy's own model, with a new head")
    lr: _Factor | None = Field(None, description="default: the trainer's")
    value_clip: _Factor = Field(0.5, description="how far a value may move in one batch before its loss is clipped")
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="discount of later rewards")
    lam: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="of GAE: 1 trusts returns, 0 trusts the critic")
    warmup_batches: NonNegative = Field(0, description="batches on which only the critic learns")


class KlConfig(Section):
    """The distance from a reference model, as a term of the loss or taken off the reward of each token."""

    coefficient: _Factor = 1e-3
    estimator: Literal["k1", "k2", "k3", "k3_unbounded"] = "k3"
    where: Literal["loss", "reward"] = "loss"
    reference: str | None = Field(
        None, description="model folder; default: the policy's initial weights (with LoRA: its own, adapter off)"
    )


class OverlongConfig(Section):
    """DAPO's soft punishment: 0 up to `longest` - `margin` tokens of an answer, -1 at `longest` and beyond."""

    longest: Positive
    margin: Positive

    @model_validator(mode="after")
    def _within(self) -> OverlongConfig:
        if self.margin > self.longest:
            raise ValueError("margin cannot be larger than longest")
        return self


class AlgorithmConfig(Section):
    """An algorithm and its options. An option that the algorithm does not have is refused, never ignored."""

    algorithm: Literal[
        "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "m2po", "rloo", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline", "reinforce", "decoupled_ppo", "ppo",
    ] = "grpo"  # fmt: skip
    advantage: _AdvantageName | None = Field(None, description="default: the algorithm's own")
    aggregation: _AggregationName | None = Field(None, description="default: the algorithm's own")
    norm_tokens: Positive | None = Field(
        None, description="length that seq_mean_token_sum_norm (dr_grpo) divides by: the most tokens of an answer"
    )
    convention: Literal["verl", "trl", "astraflow"] = Field(
        "verl", description="whose epsilon and bounds to follow where the reference implementations differ"
    )
    clip_low: _Factor | None = Field(None, description="default: the algorithm's own")
    clip_high: _Factor | None = Field(None, description="default: the algorithm's own")
    clip_dual: Annotated[float, Field(gt=1)] | Literal["off"] | None = Field(
        None,
        description="bound of the loss where the advantage is negative; default: the algorithm's own, with trl off",
    )
    lone_rows: Literal["zero", "reward"] = Field(
        "zero", description="advantage of a sample whose group has no other left: 0, or (verl) its reward"
    )
    sapo_tau: tuple[_Factor, _Factor] | None = Field(
        None, description="SAPO's temperatures for positive and negative advantages; default 1.0 and 1.05"
    )
    m2_threshold: _Factor | None = Field(None, description="most mean second moment of M2PO; default 0.01")
    m2_variant: Literal["clip", "mask"] | None = Field(None, description="of M2PO; default clip")
    weight_bound: _Factor | None = Field(
        None, description="of importance weights: cut to it (reinforce, 2) or dropped beyond it (decoupled_ppo, 5)"
    )
    weight_level: Literal["token", "sequence"] | None = Field(
        None, description="whether importance weights are of tokens or of whole samples; default token"
    )
    critic: CriticConfig | None = Field(None, description="of ppo; default: one with the defaults of its section")
    kl: KlConfig | None = Field(None, description="keep the policy near a reference model")
    entropy: Annotated[float, Field(ge=0)] = Field(0.0, description="factor of an entropy bonus in the loss")
    truncate: _Factor | None = Field(
        None,
        description="bound of truncated importance weights between the trainer's and the engine's log-probs, on top "
        "of any loss (TIS); needs a pass over the batch before its first update",
    )
    step_rewards: Literal["own", "to_go", "sum"] | None = Field(
        None,
        description="what rewards of single answers become: advantages of their own tokens (own), or of their own and "
        "all earlier ones (to_go), or, added up, the reward of their sample (sum); default: a sample holds at most one",
    )
    overlong: OverlongConfig | None = Field(None, description="soft punishment of long answers (DAPO)")
    loss: str | None = Field(
        None, description="module:function or file.py:function of a loss of your own, in place of the algorithm's"
    )
    overlong_filter: bool = Field(False, description="mask samples whose answer was cut (DAPO)")

    @field_validator("clip_dual", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        """YAML reads a plain `off` as false."""
        return "off" if value is False else value

    @property
    def by_steps(self) -> bool:
        """True if advantages are computed from rewards of single answers instead of samples."""
        return self.step_rewards in ("own", "to_go")

    @model_validator(mode="after")
    def _options(self) -> AlgorithmConfig:
        for name, owners in _OPTION_OF.items():
            if getattr(self, name) is not None and self.algorithm not in owners:
                raise ValueError(f"{self.algorithm} has no {name}: it is an option of {', '.join(sorted(owners))}")
        if self.algorithm == "m2po" and self.m2_variant != "mask" and (self.clip_low or self.clip_high):
            raise ValueError("m2po computes its clip bounds; clip_low and clip_high need m2_variant=mask")
        own = "seq_mean_token_sum_norm" if self.algorithm == "dr_grpo" else None
        if (self.aggregation or own) == "seq_mean_token_sum_norm" and self.norm_tokens is None:
            raise ValueError("seq_mean_token_sum_norm needs norm_tokens: give the most tokens that an answer may have")
        if (self.aggregation or own) != "seq_mean_token_sum_norm" and self.norm_tokens is not None:
            raise ValueError("norm_tokens is an option of the aggregation seq_mean_token_sum_norm")
        return self


# Options that only the backend rillflow has.
_OWN = (
    "ranks", "sharding", "copies", "accumulate", "context_ranks", "tensor_ranks", "attention", "trees", "compile",
    "lora", "optimizer", "router_loss", "replay_routing", "offload",
)  # fmt: skip
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

    backend: Literal["rillflow", "accelerate"] = Field(
        "rillflow",
        description="what computes: our packed rows and heads, or transformers and accelerate as they are, with padded "
        "rows and full logits, on one rank",
    )
    steps: Positive = Field(100, description="optimizer steps of the whole run")
    batch_groups: Positive = Field(8, description="groups in a batch; a batch is one optimizer step")
    micro_tokens: Positive = Field(8192, description="most tokens of one forward pass")
    lr: Annotated[float, Field(gt=0)] = 1e-6
    warmup_steps: NonNegative = Field(0, description="updates over which the learning rate rises to lr")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant",
        description="how the learning rate falls from lr to lr times min_lr at the last update: not, linearly, as a "
        "half cosine, or linearly over the last decay_steps updates (wsd)",
    )
    min_lr: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="the last learning rate, as a share of lr")
    decay_steps: Positive | None = Field(None, description="updates over which the learning rate of wsd falls")
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = Field(
        "adamw",
        description="adamw_8bit keeps its moments in 8 bits (torchao); muon updates the matrices of the decoder "
        "layers, with one moment, and adamw the rest",
    )
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
    copies: Positive = Field(
        1, description="copies of a sharded model; the ranks of each share its weights (HSDP), the copies add gradients"
    )
    accumulate: Literal["sharded", "whole"] = Field(
        "sharded",
        description="gradients of a sharded model between micro-batches: reduced after each, or only after the last; "
        "whole sends fewer messages and keeps a whole gradient on every rank",
    )
    context_ranks: Positive = Field(
        1,
        description="ranks that share the tokens of each micro-batch (context parallel), for rows too long for one of "
        "them; it divides ranks and the model's attention heads",
    )
    tensor_ranks: Positive = Field(
        1,
        description="ranks that share the weights of every decoder layer (tensor parallel), as transformers plans it "
        "for the model; it divides ranks and the model's heads",
    )
    attention: Literal["auto", "padded", "sdpa", "varlen", "cudnn", "flex"] = Field(
        "auto",
        description="padded runs any model; sdpa, varlen (GPU), cudnn (GPU: varlen, and cuDNN's kernel where one row "
        "fills a micro-batch) and flex (GPU) pack rows end to end, without padding",
    )
    trees: bool = Field(False, description="compute the common prefixes of a micro-batch's rows once")
    recompute: bool = Field(
        False,
        description="activation checkpointing, also of the head: less memory for a third more computing; the results "
        "of attention are kept",
    )
    offload: Literal["none", "optimizer", "activations", "both"] = Field(
        "none",
        description="what is in host memory while the GPU does not need it: `optimizer`, the moments between updates; "
        "`activations`, the inputs of layers between forward and backward (with recompute)",
    )
    compile: bool = Field(False, description="torch.compile the model's layers (GPU)")
    head_tokens: Positive = Field(
        1024, description="tokens whose logits exist at once: the head runs in pieces of this size"
    )
    lora: LoraConfig | None = Field(None, description="train adapters instead of the model")
    router_loss: Annotated[float, Field(ge=0)] = Field(
        0.0, description="factor of the loss that balances a mixture's experts, computed for each micro-batch"
    )
    replay_routing: bool = Field(
        False,
        description="send each token to the experts that the engine chose for it when it sampled; engines record them",
    )
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

    def offloads(self, what: Literal["optimizer", "activations"]) -> bool:
        return self.offload in (what, "both")

    @property
    def teams(self) -> int:
        """Return among how many ranks, or teams of ranks that share micro-batches, a batch is divided."""
        return self.ranks // self.team

    @property
    def team(self) -> int:
        """Return how many ranks share micro-batches."""
        return self.context_ranks * self.tensor_ranks

    @property
    def held_alike(self) -> int:
        """Return how many ranks hold the same part of a weight of which each holds only a part."""
        return self.teams if self.tensor_ranks > 1 else self.copies

    @property
    def lockstep(self) -> bool:
        """True if ranks compute together within a pass, so that all of them must run equally many."""
        return self.sharding == "fsdp" or self.team > 1

    @model_validator(mode="after")
    def _fits(self) -> TrainerConfig:
        if self.graph is not None and self.nodes:
            raise ValueError("give `graph` (all nodes) or `nodes` (added to the algorithm's own), not both")
        if self.updates > self.batch_groups:
            raise ValueError("updates cannot be more than batch_groups: each update needs a group")
        if self.offloads("activations") and not self.recompute:
            raise ValueError(f"offload: {self.offload} needs recompute: true, which keeps nothing else of a layer")
        if (self.router_loss or self.replay_routing) and self.compile:
            raise ValueError("router_loss and replay_routing need compile: false")
        if (self.schedule == "wsd") != (self.decay_steps is not None):
            raise ValueError("decay_steps belongs to schedule: wsd, which needs it")
        if self.schedule == "constant" and self.min_lr:
            raise ValueError("min_lr belongs to a schedule: linear, cosine or wsd")
        if self.backend != "rillflow":
            own = [name for name in _OWN if getattr(self, name) != type(self).model_fields[name].default]
            if own:
                raise ValueError(
                    f"backend: {self.backend} has no {', '.join(own)}: remove it, or set backend: rillflow"
                )
        if self.profile is not None:
            first, _, last = self.profile.partition("-")
            if not 0 <= int(last or first) - int(first) < _MOST_PROFILED:
                raise ValueError(f"profile: {self.profile} must be one to {_MOST_PROFILED} steps, the first one first")
        return self

    @model_validator(mode="after")
    def _shared(self) -> TrainerConfig:
        """Check what ranks share: the model, or the tokens of a micro-batch."""
        if self.optimizer != "adamw" and self.sharding == "fsdp":
            raise ValueError(f"optimizer: {self.optimizer} needs sharding: none, because it must see whole matrices")
        if self.sharding == "none" and (self.copies > 1 or self.accumulate != "sharded"):
            raise ValueError("copies and accumulate belong to sharding: fsdp")
        for name in ("copies", "context_ranks", "tensor_ranks"):
            if self.ranks % (each := getattr(self, name)):
                raise ValueError(f"ranks ({self.ranks}) must be a multiple of {name} ({each})")
        for name in ("context_ranks", "tensor_ranks"):
            if getattr(self, name) > 1 and self.attention == "padded":
                raise ValueError(f"{name} shares packed rows: remove attention: padded")
        if self.tensor_ranks > 1:
            lacking = {
                "sharding: fsdp": self.sharding == "fsdp",
                "context_ranks": self.context_ranks > 1,
                "lora": self.lora is not None,
                f"optimizer: {self.optimizer}": self.optimizer != "adamw",
            }
            if used := [name for name, there in lacking.items() if there]:
                raise ValueError(f"tensor_ranks does not work with {', '.join(used)}: remove one of them")
        return self
