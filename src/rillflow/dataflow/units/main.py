"""The process of a storage unit: opens the unit that the recipe asks for and serves it until cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rillflow.config import Recipe
from rillflow.dataflow.units.files import FileUnit
from rillflow.dataflow.units.redis import RedisUnit
from rillflow.dataflow.units.service import BEAT_DEADLINE, ServedUnit, UnitService
from rillflow.types import UnitBeat, UnitBeatReply
from rillflow.types.routes import Dataflow
from rillflow.wire import Client

UNITS = "units"


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
    host: str = "127.0.0.1",
    port: int = 0,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until cancelled; `on_ready` gets the URL."""
    unit = await asyncio.to_thread(open_unit, recipe, folder, name)
    dataflow = Client(dataflow_url, token, peer="dataflow")

    async def beat(news: UnitBeat) -> UnitBeatReply:
        return await dataflow.call(Dataflow.unit_beat, news, BEAT_DEADLINE)

    try:
        service = UnitService(unit, token, beat)
        try:
            on_ready(await service.start(host, port))
            await asyncio.Event().wait()
        finally:
            await service.stop()
    finally:
        await dataflow.close()
        unit.close()
