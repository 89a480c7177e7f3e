"""Every service of a run, started with nothing behind it but what its long polls wait for; and bodies for its routes.

Bodies are made from the types in the route tables. A value is looked up by the name of its field, so a new route is
tested without a word here, unless it names something new that must exist.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from dataflow_server import Served, served

from counting_engine import CountingEngine
from dataflow_world import POLICY, UNIT, FakeClock
from rillflow.config import load_recipe
from rillflow.dashboard.server import Dashboard
from rillflow.dashboard.watched import WatchedRun
from rillflow.dataflow.storage_unit import FileUnit, UnitService
from rillflow.engine.host import EngineHost
from rillflow.engine.remote import EngineService
from rillflow.gateway import Gateway
from rillflow.gateway.control import Control
from rillflow.gateway.engine_pool import Fleet
from rillflow.gateway.feed import Feed
from rillflow.gateway.rollout_manager import RolloutManager, add_engine_routes
from rillflow.runtime.folder import RunFolder
from rillflow.storage import write_json
from rillflow.types import AskTurn, UnitBeat, UnitBeatReply
from rillflow.types.routes import Route
from rillflow.weights.transport.relay import RelayService, RelayShelf
from rillflow.weights.transport.serve import NOTHING, FolderShelf, WeightService
from rillflow.wire import Service
from rillflow.wire.tokens import scoped_token

STAGE, OPEN = "score", "s1"  # `OPEN` is what each open segment of a path is asked for with
WAIT = 50.0
_NEW = {"str": "x", "int": 1, "float": 0.5, "bool": False, "dict": {}, "list": [], "tuple": [], "any": None}


@dataclass(frozen=True)
class Started:
    url: str
    service: Service


@asynccontextmanager
async def every_service(folder: Path, token: str) -> AsyncIterator[list[Started]]:
    """The clocks stand still: a long poll waits until it is woken, or until its client disconnects."""
    clock = FakeClock()
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(served(folder, clock=clock, stages=(STAGE,)))
        await exhaust(run)
        started = [Started(run.url, run.service)]

        async def start(service: Service) -> str:
            started.append(Started(await service.start(), service))
            return started[-1].url

        async def beat(news: UnitBeat) -> UnitBeatReply:
            return UnitBeatReply(drop=[])

        unit = FileUnit(folder / "unit")
        stack.callback(unit.close)
        await start(UnitService(unit, token, beat))
        weights = await start(WeightService(FolderShelf(folder / "weights", clock), token))
        reading = scoped_token(token, "reader")
        relay = RelayShelf([weights], reading, folder / "relay", clock=clock)
        await relay.line(OPEN, NOTHING, 0.0)  # the first question is answered as soon as upstream has answered
        await start(RelayService(relay, reading))
        await start(EngineService(EngineHost("engine-0", {POLICY: CountingEngine(hand_out=True)}), token))
        gateway = Gateway(token, {}, {})
        Control(gateway, Feed(), on_reward=lambda session: None, givers="agent")
        add_engine_routes(gateway, RolloutManager(Fleet()))
        await start(gateway)
        await start(Service("trainer", token))
        await start(Dashboard([WatchedRun(run_with(token, folder / "runs"), OPEN)]))
        try:
            yield started
        finally:
            await asyncio.gather(*(one.service.stop() for one in started[1:]))


def run_with(token: str, parent: Path) -> RunFolder:
    """A run folder with this token; nothing runs there."""
    made = RunFolder.create(load_recipe("quickstart"), parent)
    write_json(made.root / "run.json", {"token": token, "started": 0.0}, private=True)
    return made


async def exhaust(run: Served) -> None:
    """Take whatever a long poll could give: all tasks, and the turn to change weights."""
    await run.join()
    await run.lease(10_000)
    await run.client.turn(AskTurn(policy=POLICY, engine="first"))


def path_of(route: Route[Any, Any]) -> str:
    """The route's path with a value for each open segment, and what makes a raw long poll wait."""
    path = re.sub(r"{\w+:int}", "0", route.path)
    path = re.sub(r"{\w+}", OPEN, path)
    return f"{path}?known={NOTHING}&wait={WAIT}" if route.waits and route.method == "GET" else path


def example(body: type, known: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """A body of this type. `known` has values of fields by the name of a struct, those of any struct under ''."""
    found = msgspec.inspect.type_info(body)
    made = _value(found, {"": {}} | dict(known or {}))
    assert isinstance(made, dict), f"{body} is not a struct"
    return made


def _value(kind: msgspec.inspect.Type, known: Mapping[str, Mapping[str, Any]]) -> Any:
    match kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            values = NAMED | known[""] | known.get(cls.__name__, {})
            return {
                field.name: values[field.name] if field.name in values else _value(field.type, known)
                for field in fields
                if field.required or field.name in values
            }
        case msgspec.inspect.ListType(item_type=item) if isinstance(item, msgspec.inspect.StructType):
            return [_value(item, known)]
        case msgspec.inspect.UnionType(types=types):
            return None if msgspec.inspect.NoneType() in types else _value(types[0], known)
    return _NEW[type(kind).__name__.removesuffix("Type").lower()]


# Values of fields by name that are meaningful to the service.
NAMED: Mapping[str, Any] = {
    "policy": POLICY,
    "url": "http://127.0.0.1:1",
    "stage": STAGE,
    "unit": UNIT,
    "versions": {POLICY: 0},
    "version": 0,
    "groups": 2,
    "checkpoint": 0,
    "incarnation": "i",
    "attempt": "again",
    "wait": 0.0,
    "news": 0,
}
