"""Starts a rollout node: engines, gateway with the sessions of the node before it, then the node's loop."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.units import UnitWriter
from rillflow.config import Recipe
from rillflow.contracts import SystemClock
from rillflow.errors import RunError
from rillflow.gateway.control import Control
from rillflow.gateway.feed import Feed
from rillflow.gateway.sampling.manager import add_engine_routes
from rillflow.gateway.sampling.node_engines import node_engines
from rillflow.gateway.server import Gateway
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.sessions.session_log import FileSessionLog
from rillflow.rollout.cast import build_gateway, open_cast
from rillflow.rollout.handover import Handover
from rillflow.rollout.kept import FailureSender
from rillflow.rollout.late import LateRewards
from rillflow.rollout.leaving import Departure
from rillflow.rollout.node import Node
from rillflow.rollout.push import Pusher
from rillflow.storage import read_json, startup, write_json
from rillflow.wire import Client
from rillflow.wire.collecting import keep_what_is_there
from rillflow.wire.tokens import Keyring

log = logging.getLogger(__name__)


async def run_node(
    name: str,
    recipe: Recipe,
    *,
    dataflow_url: str,
    token: str,
    keyring: Keyring,
    weights: Path,
    folder: Path,
    on_ready: Callable[[str], None],
    host: str = "127.0.0.1",
    port: int = 0,
    handover: Handover | None = None,
    departure: Departure | None = None,
    patience: float | None = None,
) -> None:
    """Play until the run has ended, the node has left or the caller cancels; `on_ready` gets the gateway's URL.

    `token` is the node's, with which it calls others; the `keyring` tells who may call its gateway. `folder` is the
    node's own and outlives it; `port` is where the gateway was before, if it was. With a `handover` the node plays only
    when a trainer in the same process lets it, with that trainer's weights. `departure` tells it to leave; after
    `patience` seconds without an answer of the service it gives up.
    """
    # Time-outs stand still while training has paused a hosted node.
    clock, feed = SystemClock() if handover is None else handover.clock, Feed()
    late = LateRewards(clock)
    async with AsyncExitStack() as stack:
        startup.doing("opening the workflow and its tools")
        cast = await stack.enter_async_context(open_cast(recipe, feed, folder))
        dataflow = DataflowClient(Client(dataflow_url, token, peer="dataflow"))
        writer = UnitWriter(dataflow.units, token, segment_bytes=recipe.dataflow.units.segment_bytes)
        sessions = FileSessionLog(folder / "sessions")
        startup.doing("loading the model")
        engines = node_engines(
            recipe,
            name=name,
            token=token,
            weights=weights,
            roster=dataflow.engines,
            stores={recipe.policy: handover.weights} if handover is not None else {},
            turn=dataflow.turn,
            tell=dataflow.fetching,
            hosted=handover is not None,
            spans=None if handover is None else handover.spans,
        )
        gateway = build_gateway(recipe, token, engines, keyring=keyring, sessions=sessions, clock=clock)
        add_engine_routes(gateway, engines.manager)
        Control(gateway, feed, late.given, recipe.reward_givers)
        # The gateway goes first: no agent is to see the engines go.
        for close in (dataflow.close, writer.close, sessions.close, engines.close, gateway.stop):
            stack.push_async_callback(close)
        pusher = Pusher(
            name,
            dataflow,
            writer,
            recipe.untrained,
            errors=cast.surroundings.errors,
            failures=FailureSender(clock) if recipe.observe.trajectories.keeps_failures else None,
        )
        episodes = cast.episodes(gateway, pusher, late, clock)
        going_on = episodes.going_on(gateway.sessions.restore())
        startup.doing("preparing the environment")
        await cast.prepare()
        await engines.start()
        startup.doing("starting the gateway")
        if handover is not None:
            await handover.attach(engines, episodes)
            stack.callback(handover.detach)
        url = episodes.gateway_url = await _listen(gateway, host, port)
        log.info("node %s: gateway at %s", name, url)
        node = Node(
            name,
            incarnation(folder, going_on),
            recipe.rollout,
            dataflow=dataflow,
            engines=engines,
            episodes=episodes,
            departure=departure,
            patience=patience,
        )
        feed.on_ask = node.wake
        keep_what_is_there()
        on_ready(url)
        await node.run(going_on)
        feed.close()


async def _listen(gateway: Gateway, host: str, port: int) -> str:
    """Where the gateway was before, because agents look for it there; elsewhere if another program took the port."""
    try:
        return await gateway.start(host, port)
    except RunError as error:
        if not port:
            raise
        log.warning("%s; agents that were connected there lose their sessions", error.message)
        return await gateway.start(host)


def incarnation(folder: Path, going_on: Sequence[Session]) -> str:
    """That of the node before this one where sessions of it go on; else a new one: then its leases return at once."""
    path = folder / "node.json"
    if going_on and path.is_file():
        return str(read_json(path)["incarnation"])
    fresh = uuid.uuid4().hex
    write_json(path, {"incarnation": fresh})
    return fresh
