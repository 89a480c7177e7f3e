"""The engine that a recipe asks for, and what keeps it on its newest weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rillflow.clients.dataflow import Ask, EngineTurn, FetchWord, Tell
from rillflow.config import PolicyConfig
from rillflow.contracts import Engine
from rillflow.engine.embedded import EmbeddedEngine
from rillflow.errors import ConfigError, EngineError
from rillflow.weights.manifest import key_of
from rillflow.weights.models import load_policy_model, load_tokenizer, pick_device
from rillflow.weights.pull import Puller
from rillflow.weights.refresh import Refresher
from rillflow.weights.transport.sources import open_source

if TYPE_CHECKING:
    from rillflow.contracts import Tensors


def build_engine(policy: PolicyConfig, *, exact: bool, logs: Path | None = None, adapters: bool = True) -> Engine:
    """Return the engine of a policy. Its initial weights are version 0, the same that the trainer publishes first. A
    server writes its log into the folder `logs`. Without `adapters` it will get whole weights only."""
    if policy.trainer.replay_routing and exact:
        raise ConfigError(
            "trainer.replay_routing does nothing under runtime.deterministic: engine and trainer compute the same bits",
            "remove one of them",
        )
    if policy.engine.kind != "embedded":
        return _server_engine(policy, exact=exact, logs=logs, adapters=adapters)
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
            record=policy.trainer.replay_routing,
        )
    except EngineError as error:  # another start would fail in the same way
        raise ConfigError(f"{policy.model}: {error.message}", error.hint) from error


def build_engines(
    policies: Mapping[str, PolicyConfig], *, exact: bool, logs: Path | None = None, whole: Collection[str] = ()
) -> dict[str, Engine]:
    """Return the engines of several policies. Those in `whole` get whole weights only, from this process's memory."""
    engines: dict[str, Engine] = {}
    groups: dict[tuple[str, str], list[str]] = {}
    for name, policy in policies.items():
        server = policy.engine.server
        if name in whole and server.adapters in ("native", "shared"):
            raise ConfigError(
                f"engine.server.adapters {server.adapters} does not work for policy {name}: its trainer gives this "
                "process whole weights",
                "set it to auto or merged",
            )
        if server.adapters == "shared":
            groups.setdefault((policy.model, policy.engine.device), []).append(name)
        else:
            engines[name] = build_engine(policy, exact=exact, logs=logs, adapters=name not in whole)
    for names in groups.values():
        engines |= _shared_engines({name: policies[name] for name in names}, exact=exact, logs=logs)
    return {name: engines[name] for name in policies}


def _shared_engines(policies: Mapping[str, PolicyConfig], *, exact: bool, logs: Path | None) -> dict[str, Engine]:
    """Return engines with one server, whose adapters are those of all these policies."""
    from rillflow.engine.servers.adapters import joined
    from rillflow.engine.servers.adding import SharedServer
    from rillflow.engine.servers.vllm import VllmEngine

    first, *others = policies
    for name in others:
        one, other = policies[first], policies[name]
        if one.engine != other.engine or one.trainer.replay_routing != other.trainer.replay_routing:
            raise ConfigError(
                f"policies {first} and {name} share a server, but not all settings of engine and replay_routing",
                "make them equal, or set engine.server.adapters of one to auto",
            )
    engines = {name: build_engine(policy, exact=exact, logs=logs) for name, policy in policies.items()}
    served = [engine for engine in engines.values() if isinstance(engine, VllmEngine)]
    plan, shared = joined([engine.plan for engine in served if engine.plan is not None]), SharedServer()
    for engine in served:
        engine.share(shared, plan)
    return engines


def _server_engine(policy: PolicyConfig, *, exact: bool, logs: Path | None, adapters: bool) -> Engine:
    from rillflow.engine.servers.adapters import plan_adapters
    from rillflow.engine.servers.weights import model_facts

    settings = policy.engine
    if exact:
        raise ConfigError(
            f"runtime.deterministic does not work with engine.kind {settings.kind}: its draws are not reproducible",
            "use engine.kind embedded",
        )
    if settings.on_update != "refill" and settings.kind != "vllm":
        raise ConfigError(
            f"engine.on_update {settings.on_update} does not work with engine.kind {settings.kind}",
            "leave it at refill: running answers are computed again under new weights",
        )
    record = policy.trainer.replay_routing
    if record and settings.kind != "vllm":
        raise ConfigError(
            f"trainer.replay_routing does not work with engine.kind {settings.kind}: it does not record experts yet",
            "use engine.kind embedded or vllm, or remove trainer.replay_routing",
        )
    facts = model_facts(policy.model, settings.dtype)
    if record and not facts.router_layers:
        raise ConfigError(
            f"{policy.model} has no router of experts that can be recorded", "remove trainer.replay_routing"
        )
    if record and pick_device(settings.device).type == "cpu":
        raise ConfigError(
            "trainer.replay_routing does not work with vLLM on a CPU: its model runner there does not return experts",
            "use a GPU or engine.kind embedded, or remove trainer.replay_routing",
        )
    if settings.kind == "vllm":
        from rillflow.engine.servers.vllm import VllmEngine

        plan = plan_adapters(policy, facts) if adapters else None
        return VllmEngine(facts, settings, logs=logs, record=record, adapters=plan)
    from rillflow.engine.servers.sglang import SglangEngine

    return SglangEngine(facts, settings, logs=logs)


def follow(
    policy: str,
    settings: PolicyConfig,
    engine: Engine,
    *,
    name: str,
    weights: Path,
    token: str,
    turn: Ask | None = None,
    tell: Tell | None = None,
) -> Refresher:
    """Return what keeps an engine on the newest weights of its policy.

    Weights come from the recipe's source, or from the run's folder `weights`. `name` is the name of this process: it
    asks for turns and announces downloads under it, and its cache of a remote source lies beside `weights`."""
    far = settings.weights.source
    source = open_source(
        far or weights,
        policy,
        # The run's own folder needs no signature: a process that can write to it can also read the key beside it.
        key=key_of(token) if far else b"",
        cache=weights.parent / "cache" / name,
        streams=settings.weights.streams,
        token=token,
    )

    def initial() -> Tensors:
        tensors: Tensors = load_policy_model(settings.model, settings.engine.dtype, torch.device("cpu")).state_dict()
        return tensors

    word = FetchWord(tell, policy, name) if tell else None
    puller = Puller(source, settings.weights.mode, initial=initial, announce=word)
    return Refresher(
        policy,
        engine,
        puller,
        turn=EngineTurn(turn, policy, name) if turn else None,
        doubts=settings.proves,
    )
