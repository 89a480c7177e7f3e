"""What models say of the trained tokens, without gradient: log-probs and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.registry import REGISTRY, Function
from rillflow.trainer.graph.step import Step

if TYPE_CHECKING:
    from rillflow.trainer.graph.databuffer import Column


def actor_logprobs(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Under the weights before the batch's first update: the proximal policy."""
    return {"proximal_N": step.models["actor"].infer(data, step.check)}


def reference_logprobs(step: Step, data: Databuffer) -> Mapping[str, Column]:
    return {"reference_N": step.models["reference"].infer(data, step.check)}


def critic_values(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Of the tokens before each trained one: what is still to come, before it is chosen."""
    return {"value_N": step.models["critic"].infer(data, step.check)}


REGISTRY.add(Function("actor_logprobs", "actor", "infer", actor_logprobs, gives=("proximal_N",), default=True))
REGISTRY.add(
    Function("reference_logprobs", "reference", "infer", reference_logprobs, gives=("reference_N",), default=True)
)
REGISTRY.add(Function("critic_values", "critic", "infer", critic_values, gives=("value_N",), default=True))
