"""The process of a storage unit: opens the unit that the recipe asks for and serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rillflow.config import Recipe
from rillflow.dataflow.units.files import FileUnit
from rillflow.dataflow.units.redis import RedisUnit
from rillflow.dataflow.units.service import BEAT_DEADLINE, BEAT_SECONDS, ServedUnit, UnitService
from rillflow.errors import RunError
from rillflow.types import UnitBeat, UnitBeatReply
from rillflow.types.routes import Dataflow
from rillflow.wire import Client
from rillflow.wire.tokens import Keyring

UNITS = "units"
_GONE = 5.0  # seconds without an answer of the service of a run that has ended


def open_unit(recipe: Recipe, folder: Path, name: str) -> ServedUnit:
    """The unit `name` of the run in `folder`, new or as it was left."""
    wanted = recipe.dataflow.units
    if wanted.kind == "redis":
        return RedisUnit(wanted.redis, folder.resolve().name, name, durability=wanted.durability)
    return FileUnit(folder / UNITS / name, name, segment_bytes=wanted.segment_bytes, durability=wanted.durability)


async def serve_unit(
    recipe: Recipe,
    folder: Path,
    name: str,
    token: str,
    dataflow_url: str,
    *,
    keyring: Keyring | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    on_ready: Callable[[str], None] = lambda url: None,
    patience: float | None = None,
) -> None:
    """Serve until cancelled; `on_ready` gets the URL. `token` is the unit's, with which it calls the dataflow service;
    the `keyring` tells who may call it (default: `token` is the run's own). With a `patience`, for a unit that nobody
    supervises, it ends with the run's service, and RunError when that has not answered for so many seconds."""
    unit = await asyncio.to_thread(open_unit, recipe, folder, name)
    dataflow = Client(dataflow_url, token, peer="dataflow")
    clock = asyncio.get_running_loop().time
    heard, ended = clock(), False

    async def beat(news: UnitBeat) -> UnitBeatReply:
        nonlocal heard, ended
        reply = await dataflow.call(Dataflow.unit_beat, news, BEAT_DEADLINE)
        heard, ended = clock(), reply.ended
        return reply

    try:
        service = UnitService(unit, keyring or token, beat)
        try:
            on_ready(await service.start(host, port))
            while patience is None or clock() - heard < (_GONE if ended else patience):  # noqa: ASYNC110
                await asyncio.sleep(BEAT_SECONDS)
            if not ended:
                raise RunError(
                    f"the run's service has not answered for {patience:.0f} s", "is the run over, or its host gone?"
                )
        finally:
            await service.stop()
    finally:
        await dataflow.close()
        unit.close()
