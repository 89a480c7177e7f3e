"""Starts a rollout node: models, engines, gateway, then the node's loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import openai

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.units import UnitWriter
from rillflow.config import PolicyConfig, Recipe
from rillflow.contracts import Engine
from rillflow.engine.embedded import EmbeddedEngine
from rillflow.gateway.calls import Policy
from rillflow.gateway.render import Renderer
from rillflow.gateway.server import Gateway
from rillflow.rollout.episode import load_workflow
from rillflow.rollout.node import Node
from rillflow.rollout.refresh import Refresher
from rillflow.weights.models import load_policy_model, pick_device
from rillflow.weights.store import FolderStore
from rillflow.wire import Client

log = logging.getLogger(__name__)


def build_engine(policy: PolicyConfig, *, exact: bool) -> Engine:
    """The initial weights are version 0, the same as the trainer publishes first."""
    model = load_policy_model(policy.model, policy.engine.dtype, pick_device(policy.engine.device))
    return EmbeddedEngine(
        model,
        version=0,
        slots=policy.engine.slots,
        context=policy.engine.context,
        queue=policy.engine.queue,
        exact=exact,
    )


async def run_node(
    name: str,
    recipe: Recipe,
    *,
    dataflow_url: str,
    token: str,
    weights: Path,
    on_ready: Callable[[str], None],
    host: str = "127.0.0.1",
) -> None:
    """Play until the run has ended or the caller cancels; `on_ready` gets the gateway's URL."""
    workflow, reward = load_workflow(recipe)
    engines = {n: build_engine(p, exact=recipe.runtime.deterministic) for n, p in recipe.policies.items()}
    refreshers = {n: Refresher(n, engine, FolderStore(weights / n)) for n, engine in engines.items()}
    gateway = Gateway(
        token,
        {n: Policy(engines[n], Renderer.load(p.model), p.tools, p.reasoning) for n, p in recipe.policies.items()},
        {n: p.sampling for n, p in recipe.policies.items()},
        limits=recipe.gateway,
    )
    dataflow = DataflowClient(Client(dataflow_url, token, peer="dataflow"))
    writer = UnitWriter(dataflow.units, token, segment_bytes=recipe.dataflow.units.segment_bytes)
    client = openai.AsyncOpenAI(
        base_url=f"{host}", api_key="unset", http_client=openai.DefaultAioHttpClient(timeout=None), max_retries=0
    )
    try:
        for engine in engines.values():
            await engine.start()
        url = await gateway.start(host)
        await asyncio.gather(*(refresher.refresh() for refresher in refreshers.values()))
        log.info("node %s: gateway at %s", name, url)
        on_ready(url)
        node = Node(
            name,
            recipe,
            dataflow=dataflow,
            writer=writer,
            gateway=gateway,
            gateway_url=url,
            engines=engines,
            refreshers=refreshers,
            workflow=workflow,
            reward=reward,
            client=client,
        )
        await node.run()
    finally:
        await asyncio.gather(*(engine.close() for engine in engines.values()), return_exceptions=True)
        await gateway.stop()
        await client.close()
        await writer.close()
        await dataflow.close()
