"""Starts a rollout node: engines, gateway with the sessions of the node before it, then the node's loop."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.ledgers import connect
from rillflow.clients.units import UnitWriter
from rillflow.config import Recipe
from rillflow.contracts import SystemClock
from rillflow.errors import RunError
from rillflow.gateway.control import Control
from rillflow.gateway.feed import Feed
from rillflow.gateway.node_engines import NodeEngines, node_engines
from rillflow.gateway.rollout_manager import add_engine_routes
from rillflow.gateway.server import Gateway
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.sessions.session_log import FileSessionLog
from rillflow.rollout.cast import Cast, build_gateway, open_cast
from rillflow.rollout.episodes import Episodes
from rillflow.rollout.handover import Handover
from rillflow.rollout.node import Departure, Node
from rillflow.rollout.push import FailureSender, Pusher
from rillflow.rollout.rewards import LateRewards
from rillflow.storage import read_json, startup, write_json
from rillflow.wire.blocking import collect_seldom, keep_what_is_there
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

    `token` is the node's own, for its calls of others; the `keyring` says who may call its gateway. `folder` belongs to
    the node and outlives it; `port` is where the gateway of the node before it was. With a `handover` the node plays
    only while a trainer in the same process lets it, with that trainer's weights. `departure` tells it to leave; after
    `patience` seconds without an answer of the service it gives up.
    """
    given = _Given(name, recipe, dataflow_url, token, keyring, weights, folder)
    async with AsyncExitStack() as stack:
        parts = await _open(stack, given, handover)
        going_on = parts.episodes.going_on(parts.gateway.sessions.restore())
        startup.doing("preparing the environment")
        await parts.cast.prepare()
        await parts.engines.start()
        startup.doing("starting the gateway")
        if handover is not None:
            await handover.attach(parts.engines, parts.episodes)
            stack.callback(handover.detach)
        url = parts.episodes.gateway_url = await _listen(parts.gateway, host, port)
        log.info("node %s: gateway at %s", name, url)
        node = Node(
            name,
            incarnation(folder, going_on),
            recipe.rollout,
            dataflow=parts.dataflow,
            engines=parts.engines,
            episodes=parts.episodes,
            departure=departure,
            patience=patience,
        )
        parts.feed.on_ask = node.wake
        keep_what_is_there()
        collect_seldom()
        on_ready(url)
        await node.run(going_on)
        parts.feed.close()


class _Given(NamedTuple):
    """The arguments of `run_node` that its parts are made from."""

    name: str
    recipe: Recipe
    dataflow_url: str
    token: str
    keyring: Keyring
    weights: Path
    folder: Path


class _Parts(NamedTuple):
    """The parts of a node."""

    feed: Feed
    cast: Cast
    dataflow: DataflowClient
    engines: NodeEngines
    gateway: Gateway
    episodes: Episodes


async def _open(stack: AsyncExitStack, given: _Given, handover: Handover | None) -> _Parts:
    """Make the parts of a node, to be closed in the reverse order. Nothing is started."""
    recipe, feed = given.recipe, Feed()
    # Timeouts stand still while training has paused a hosted node.
    clock = SystemClock() if handover is None else handover.clock
    late = LateRewards(clock)
    startup.doing("opening the workflow and its tools")
    cast = await stack.enter_async_context(open_cast(recipe, feed, given.folder))
    dataflow = connect(given.dataflow_url, given.token)
    writer = UnitWriter(dataflow.units, given.token, segment_bytes=recipe.dataflow.units.segment_bytes)
    sessions = FileSessionLog(given.folder / "sessions")
    startup.doing("loading the model")
    engines = node_engines(
        recipe,
        name=given.name,
        token=given.token,
        weights=given.weights,
        roster=dataflow.engines,
        stores={recipe.policy: handover.weights} if handover is not None else {},
        turn=dataflow.turn,
        tell=dataflow.fetching,
        hosted=handover is not None,
        spans=None if handover is None else handover.spans,
    )
    gateway = build_gateway(recipe, given.token, engines, keyring=given.keyring, sessions=sessions, clock=clock)
    add_engine_routes(gateway, engines.manager)
    Control(gateway, feed, late.given, recipe.reward_givers)
    # The gateway is closed first: no agent sees the engines go.
    for close in (dataflow.close, writer.close, sessions.close, engines.close, gateway.stop):
        stack.push_async_callback(close)
    pusher = Pusher(
        given.name,
        dataflow,
        writer,
        recipe.untrained,
        errors=cast.surroundings.errors,
        failures=FailureSender(clock) if recipe.observe.trajectories.keeps_failures else None,
    )
    return _Parts(feed, cast, dataflow, engines, gateway, cast.episodes(gateway, pusher, late, clock))


async def _listen(gateway: Gateway, host: str, port: int) -> str:
    """Listen where the gateway was before, because agents look for it there; elsewhere if the port is taken."""
    try:
        return await gateway.start(host, port)
    except RunError as error:
        if not port:
            raise
        log.warning("%s; agents that were connected there lose their sessions", error.message)
        return await gateway.start(host)


def incarnation(folder: Path, going_on: Sequence[Session]) -> str:
    """Return the incarnation of the node before this one if sessions of it go on, else a new one: its leases return at
    once then."""
    path = folder / "node.json"
    if going_on and path.is_file():
        return str(read_json(path)["incarnation"])
    fresh = uuid.uuid4().hex
    write_json(path, {"incarnation": fresh})
    return fresh
