"""The engine that a recipe asks for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rillflow.config import PolicyConfig
from rillflow.contracts import Engine
from rillflow.engine.embedded import EmbeddedEngine
from rillflow.errors import ConfigError, EngineError
from rillflow.weights.models import load_policy_model, load_tokenizer, pick_device


def build_engine(policy: PolicyConfig, *, exact: bool, logs: Path | None = None) -> Engine:
    """The initial weights are version 0, the same as the trainer publishes first. `logs`: where servers' words go."""
    if policy.engine.kind != "embedded":
        return _server_engine(policy, exact=exact, logs=logs)
    model = load_policy_model(policy.model, policy.engine.dtype, pick_device(policy.engine.device))
    try:
        return EmbeddedEngine(
            model,
            version=0,
            slots=policy.engine.slots,
            context=policy.engine.context,
            queue=policy.engine.queue,
            exact=exact,
            on_update=policy.engine.on_update,
            tokenizer=partial(load_tokenizer, policy.model),
        )
    except EngineError as error:  # it would be the same at the next start
        raise ConfigError(f"{policy.model}: {error.message}", error.hint) from error


def _server_engine(policy: PolicyConfig, *, exact: bool, logs: Path | None) -> Engine:
    from rillflow.engine.servers.facts import model_facts

    settings = policy.engine
    if exact:
        raise ConfigError(
            f"runtime.deterministic is not to be had with engine.kind {settings.kind}: its draws are not reproducible",
            "use engine.kind embedded",
        )
    if settings.on_update != "refill":
        raise ConfigError(
            f"engine.on_update {settings.on_update} is not to be had with engine.kind {settings.kind}",
            "leave it at refill: answers that run are computed again under new weights",
        )
    facts = model_facts(policy.model, settings.dtype)
    if settings.kind == "vllm":
        from rillflow.engine.vllm import VllmEngine

        return VllmEngine(facts, settings, logs=logs)
    from rillflow.engine.sglang.engine import SglangEngine

    return SglangEngine(facts, settings, logs=logs)
