"""Which algorithm a trainer runs, and its options."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rillflow.config.base import NonNegative, Positive, Section

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
