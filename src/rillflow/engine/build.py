"""The engine that a recipe asks for."""

from __future__ import annotations

from rillflow.config import PolicyConfig
from rillflow.engine.embedded import EmbeddedEngine
from rillflow.weights.models import load_policy_model, pick_device


def build_engine(policy: PolicyConfig, *, exact: bool) -> EmbeddedEngine:
    """The initial weights are version 0, the same as the trainer publishes first."""
    model = load_policy_model(policy.model, policy.engine.dtype, pick_device(policy.engine.device))
    return EmbeddedEngine(
        model,
        version=0,
        slots=policy.engine.slots,
        context=policy.engine.context,
        queue=policy.engine.queue,
        exact=exact,
        on_update=policy.engine.on_update,
    )
