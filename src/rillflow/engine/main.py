"""An engine process: it samples every policy of a run for nodes elsewhere, follows the weights and reports itself."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.ledgers import connect
from rillflow.config import EngineConfig, Recipe
from rillflow.engine.build import build_engines, follow
from rillflow.engine.host import EngineHost, tell_busy
from rillflow.engine.remote import EngineService
from rillflow.errors import RillflowError, RunError
from rillflow.storage import startup
from rillflow.storage.spans import open_spans
from rillflow.weights.delta import Ahead
from rillflow.weights.models import DTYPES, pick_device
from rillflow.weights.refresh import troubles
from rillflow.wire.blocking import keep_what_is_there
from rillflow.wire.tokens import Keyring

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
BEAT_DEADLINE = 5.0
PREPARE_DEADLINE = 60.0  # after it, the first decoding waits for the compiler


async def run_engine(
    name: str,
    recipe: Recipe,
    *,
    dataflow_url: str,
    token: str,
    keyring: Keyring,
    weights: Path,
    on_ready: Callable[[str], None],
    host: str = "127.0.0.1",
    patience: float = math.inf,
) -> None:
    """Serve until cancelled; `on_ready` gets the URL. `token` is the process's own, for its calls of others; the
    `keyring` says who may call it. It announces itself only once it has the newest weights. A process without a
    supervisor has a `patience`: it ends with the run, or when the service has not answered for that many seconds.
    """
    exact = recipe.runtime.deterministic
    logs = weights.parent / "logs"
    startup.doing("loading the model")
    engines = build_engines(recipe.policies, exact=exact, logs=logs)
    served = EngineHost(name, engines)
    service = EngineService(served, keyring)
    dataflow = connect(dataflow_url, token)
    refreshers = [
        follow(
            policy,
            settings,
            engines[policy],
            name=name,
            weights=weights,
            token=token,
            turn=dataflow.turn if recipe.rollout.staggered else None,
            tell=dataflow.fetching,
        )
        for policy, settings in recipe.policies.items()
    ]
    news, spans = asyncio.Event(), open_spans(weights.parent, name)
    tell_busy(served, spans)
    served.trouble = lambda: troubles(refreshers)
    for refresher in refreshers:
        refresher.on_load = news.set
        refresher.spans = spans
    prepared = _prepare_deltas(recipe)  # while servers start
    try:
        await served.start()
        startup.doing("fetching the newest weights")
        for ahead in prepared:
            await asyncio.to_thread(ahead.wait, PREPARE_DEADLINE)
        await asyncio.gather(*(refresher.refresh() for refresher in refreshers))
        keep_what_is_there()
        on_ready(await service.start(host))
        async with asyncio.TaskGroup() as group:
            following = [
                group.create_task(refresher.run(recipe.rollout.refresh_every), name="refresh")
                for refresher in refreshers
            ]
            await _beat(served, dataflow, news, patience)
            for task in following:
                task.cancel()
    finally:
        await service.stop()
        await served.close()
        await asyncio.gather(*(refresher.close() for refresher in refreshers))
        await dataflow.close()
        await asyncio.to_thread(spans.close)


def _prepare_deltas(recipe: Recipe) -> list[Ahead]:
    """Compile the decoder of deltas ahead, because nodes wait for weights. Servers whose workers decode need none."""
    names = {
        settings.engine.dtype
        for settings in recipe.policies.values()
        if settings.writes_deltas and not _decodes(settings.engine)
    }
    return [Ahead(DTYPES[name], torch.device("cpu"), reads=True) for name in sorted(names)]


def _decodes(engine: EngineConfig) -> bool:
    """Return whether a server's workers will decode deltas: each of them must hold whole tensors."""
    asked = engine.server.decodes_deltas
    by_workers = pick_device(engine.device).type == "cuda" if asked is None else asked
    return engine.kind != "embedded" and by_workers and engine.server.tensor_parallel == 1


async def _beat(host: EngineHost, dataflow: DataflowClient, news: asyncio.Event, patience: float) -> None:
    """Report what this engine serves, every second and at once when it changes: nodes wait for it. Return when the run
    has ended and this process has no supervisor."""
    silent, clock = False, asyncio.get_running_loop().time
    heard = clock()
    while True:
        news.clear()
        try:
            reply = await dataflow.engine_beat(host.known, BEAT_DEADLINE)
            silent, heard = False, clock()
            if reply.ended and patience < math.inf:
                log.info("the run has ended")
                return
        except RillflowError as error:
            if not silent:
                log.warning("the dataflow service did not hear this engine: %s", error)
            silent = True
            if clock() - heard > patience:
                raise RunError(
                    f"the run's service has not answered for {patience:.0f} s", "is the run over?"
                ) from error
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                await news.wait()
