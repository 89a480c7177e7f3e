"""The engines of one node: its own, in this process, engine processes that come and go, found through the roster, or
both, where the node is hosted by a trainer that needs its own engine's worker from time to time.

The node and its gateway see the same either way: a pool for each policy and a rollout manager.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from rillflow.clients.fetching import Tell
from rillflow.clients.turns import Ask
from rillflow.config import Recipe
from rillflow.contracts import Clock, WeightStore
from rillflow.engine.build import build_engine
from rillflow.engine.follow import follow
from rillflow.engine.host import EngineHost, tell_busy
from rillflow.engine.remote import RemoteEngine
from rillflow.errors import RillflowError
from rillflow.gateway.sampling.fleet import Fleet
from rillflow.gateway.sampling.manager import RolloutManager
from rillflow.gateway.sampling.pool import EnginePool
from rillflow.storage import startup
from rillflow.storage.spans import SpanLog, Spans, open_spans
from rillflow.types import EngineInfo, Engines, LookEngines
from rillflow.weights.refresh import Refresher, StoreSupply, troubles

log = logging.getLogger(__name__)

FOLLOW_EVERY = 0.02  # seconds between two looks at the roster, at least
NEWS_WAIT = 1.0  # how long it may think about whether there is news: as often as engines tell how loaded they are
_AWAY = 0.2  # between two looks when it cannot be asked
Roster = Callable[[LookEngines], Awaitable[Engines]]


class NodeEngines:
    """What a node samples with: at least one of `host` (engines of its own) and `roster` is there.

    `spans` hear what the own engines do; what is in `closing` is closed after them.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        name: str,
        token: str,
        host: EngineHost | None = None,
        refreshers: Mapping[str, Refresher] | None = None,
        roster: Roster | None = None,
        spans: Spans | None = None,
        closing: SpanLog | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.fleet = Fleet([host] if host is not None else [])
        self.pools = {
            policy: EnginePool(policy, self.fleet, context=settings.engine.context)
            for policy, settings in recipe.policies.items()
        }
        self.manager = RolloutManager(self.fleet, name=name, pause=recipe.rollout.pause_after, clock=clock)
        self._every = recipe.rollout.refresh_every
        self._token = token
        self._host = host
        self._refreshers = dict(refreshers or {})
        self._roster = roster
        self._news = -1  # of the roster's last answer
        self._closing = closing
        for refresher in self._refreshers.values():
            refresher.on_load = self.fleet.tell
        if host is not None:
            host.trouble = lambda: troubles(self._refreshers.values())
        if host is not None and spans is not None:
            tell_busy(host, spans)
            for refresher in self._refreshers.values():
                refresher.spans = spans

    async def start(self) -> None:
        """Own engines begin with the newest weights; engine processes are looked for once."""
        if self._host is not None:
            await self._host.start()
        startup.doing("fetching the newest weights")
        await asyncio.gather(*(refresher.refresh() for refresher in self._refreshers.values()))
        await self.look()

    async def run(self) -> None:
        """Follow weights and engines for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.manager.run(), name="rollout-manager")
            for policy, refresher in self._refreshers.items():
                group.create_task(refresher.run(self._every), name=f"refresh-{policy}")
            if self._roster is not None:
                group.create_task(self._follow(), name="follow-engines")

    async def close(self) -> None:
        await self.fleet.close()
        await asyncio.gather(*(refresher.close() for refresher in self._refreshers.values()))
        if self._closing is not None:
            await asyncio.to_thread(self._closing.close)

    # ------------------------------------------------------------ the worker's other task

    async def hold(self, reason: str, *, move: bool = False, free: bool = False) -> bool:
        """Keep the own engines from sampling until `release`. With `move`, the answers under way go on at engine
        processes, if any is there to take them: returns whether they did. Others wait."""
        if self._host is None:
            return False
        moving = move and all(self._elsewhere(policy) for policy in self.pools)
        await self._host.hold(reason, move=moving, seconds=math.inf, free=free)
        return moving

    async def release(self, reason: str) -> None:
        if self._host is not None:
            await self._host.release(reason)
            self.fleet.tell()

    def _elsewhere(self, policy: str) -> bool:
        return any(member.engine is not self._host for member in self.fleet.ready(policy))

    def own_version(self, policy: str) -> int | None:
        """What the own engine of the policy serves."""
        return self._host.engines[policy].version if self._host is not None else None

    # ------------------------------------------------------------ what the node tells others

    def versions(self) -> dict[str, int] | None:
        """Of every policy the lowest that its engines serve; None while one has no engine: no task can be played."""
        return self.fleet.versions(self.pools)

    @property
    def trouble(self) -> str:
        """Why an own engine samples nothing, because of its weights."""
        return self._host.known.trouble if self._host is not None else ""

    async def newer(self, than: Mapping[str, int], seconds: float) -> None:
        """Until the engines serve other versions, for so many seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.versions() == than:
                    await self.fleet.news(seconds)

    @property
    def own(self) -> bool:
        """Whether the engines are this node's alone, in its process."""
        return self._roster is None

    def behind(self, heads: Mapping[str, int]) -> list[str]:
        """Policies whose weights this node could pull now. Engine processes pull by themselves."""
        if self._host is None:
            return []
        return [
            name for name, engine in self._host.engines.items() if heads.get(name, engine.version) != engine.version
        ]

    async def refresh(self, policy: str) -> None:
        await self._refreshers[policy].refresh()

    def stats(self) -> dict[str, float]:
        stats: dict[str, float] = {}
        if self._roster is not None:
            stats["engines"] = sum(member.up for member in self.fleet.members.values())
        if self._host is None:
            return stats
        for policy, engine in self._host.engines.items():
            now, transfers = engine.stats(), self._refreshers[policy].transfers
            stats |= {
                f"{policy}.generated_tokens": now.generated_tokens,
                f"{policy}.prefilled_tokens": now.prefilled_tokens,
                f"{policy}.reused_tokens": now.reused_tokens,
                f"{policy}.sequences_running": now.running,
                f"{policy}.sequences_waiting": now.waiting,
                f"{policy}.slots": now.slots,
                f"{policy}.loads": transfers.loads,
                f"{policy}.delta_loads": transfers.delta_loads,
                f"{policy}.load_seconds": transfers.apply,
                f"{policy}.pause_seconds": transfers.pause,
                f"{policy}.pull_seconds": transfers.fetch + transfers.verify,
                f"{policy}.pull_bytes": transfers.bytes,
                f"{policy}.probes_passed": transfers.proven,
                f"{policy}.probes_failed": transfers.refuted,
            }
        return stats

    def waiting(self) -> list[str]:
        return [why for pool in self.pools.values() for why in pool.waiting()]

    # ------------------------------------------------------------ engine processes

    async def _follow(self) -> None:
        while True:
            known = await self.look(NEWS_WAIT)
            await asyncio.sleep(FOLLOW_EVERY if known else _AWAY)

    async def look(self, wait: float = 0.0) -> bool:
        """Ask the roster, which may wait for news; whether it answered. What is known stays as it is if not."""
        if self._roster is None:
            return False
        try:
            found = await self._roster(LookEngines(news=self._news, wait=wait))
        except RillflowError as error:
            log.warning("the roster of engines was not to be had: %s", error.message)
            return False
        self._news = found.news
        self.fleet.hear(found.engines, self._open)
        return True

    def _open(self, info: EngineInfo) -> RemoteEngine:
        log.info("engine %s is there, at %s", info.name, info.url)
        engine = RemoteEngine(info.name, info.url, self._token)
        engine.hear(info)
        return engine


def node_engines(
    recipe: Recipe,
    *,
    name: str,
    token: str,
    weights: Path,
    roster: Roster | None = None,
    stores: Mapping[str, WeightStore] | None = None,
    turn: Ask | None = None,
    tell: Tell | None = None,
    hosted: bool = False,
    spans: Spans | None = None,
    clock: Clock | None = None,
) -> NodeEngines:
    """The engines that the recipe asks for; `weights` is the folder of all weight stores but those in `stores`. With
    `turn`, not all nodes of a run change their weights at once; `tell` hears what a new one fetches. A node that is
    `hosted` by a trainer always has an engine of its own. What own engines do is written to `spans`, by default those
    of a worker of the node's name."""
    if recipe.rollout.engines and not hosted:
        return NodeEngines(recipe, name=name, token=token, roster=roster, clock=clock)
    exact = recipe.runtime.deterministic
    logs = weights.parent / "logs"
    engines = {policy: build_engine(settings, exact=exact, logs=logs) for policy, settings in recipe.policies.items()}
    refreshers = {
        policy: Refresher(policy, engine, StoreSupply(stores[policy]), doubts=recipe.policies[policy].proves)
        if stores and policy in stores
        else follow(
            policy, recipe.policies[policy], engine, name=name, weights=weights, token=token, turn=turn, tell=tell
        )
        for policy, engine in engines.items()
    }
    own_spans = open_spans(weights.parent, name) if spans is None else None
    return NodeEngines(
        recipe,
        name=name,
        token=token,
        host=EngineHost(name, engines),
        refreshers=refreshers,
        roster=roster if recipe.rollout.engines else None,
        spans=spans or own_spans,
        closing=own_spans,
        clock=clock,
    )
