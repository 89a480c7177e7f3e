"""The engines of one node: those of its own process, engine processes that it finds through the roster, or both.

A node has both if a trainer hosts it: the trainer needs the worker of the own engine from time to time. The node and
its gateway see the same in each case: a pool for each policy and a rollout manager.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from rillflow.clients.dataflow import Ask, Tell
from rillflow.config import Recipe
from rillflow.contracts import Clock, WeightStore
from rillflow.engine.build import build_engines, follow
from rillflow.engine.host import EngineHost, tell_busy
from rillflow.engine.remote import RemoteEngine
from rillflow.errors import RillflowError
from rillflow.gateway.engine_pool import EnginePool, Fleet
from rillflow.gateway.rollout_manager import RolloutManager
from rillflow.storage import startup
from rillflow.storage.spans import SpanLog, Spans, open_spans
from rillflow.types import EngineInfo, Engines, LookEngines
from rillflow.weights.refresh import Refresher, StoreSupply, troubles

log = logging.getLogger(__name__)

FOLLOW_EVERY = 0.02  # least seconds between two requests for the roster
NEWS_WAIT = 1.0  # how long such a request may wait for a change: engines report their load as often
_AWAY = 0.2  # seconds until the next request when the roster did not answer
Roster = Callable[[LookEngines], Awaitable[Engines]]


class NodeEngines:
    """The engines of a node. At least one of `host` (engines of this process) and `roster` is given.

    The activity of the own engines is written to `spans`; `closing` is closed after them.
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
            refresher.on_load = self.fleet.notify
        if host is not None:
            host.trouble = lambda: troubles(self._refreshers.values())
        if host is not None and spans is not None:
            tell_busy(host, spans)
            for refresher in self._refreshers.values():
                refresher.spans = spans

    async def start(self) -> None:
        """Load the newest weights into the own engines and read the roster once."""
        if self._host is not None:
            await self._host.start()
        startup.doing("fetching the newest weights")
        await asyncio.gather(*(refresher.refresh() for refresher in self._refreshers.values()))
        await self.look()

    async def run(self) -> None:
        """Follow weights and engines until the task is cancelled."""
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

    # ------------------------------------------------------------ while the worker trains

    async def hold(self, reason: str, *, move: bool = False, free: bool = False) -> bool:
        """Keep the own engines from sampling until `release`; with `free`, give back their spare memory.

        With `move`, running answers continue at engine processes if some serve every policy; else they wait. Returns
        whether they moved.
        """
        if self._host is None:
            return False
        moving = move and all(self._elsewhere(policy) for policy in self.pools)
        await self.manager.hold(reason, [self._host.name], move=moving)
        if free:
            await self._host.free()
        return moving

    async def release(self, reason: str) -> None:
        if self._host is not None:
            await self.manager.release(reason, [self._host.name])

    def _elsewhere(self, policy: str) -> bool:
        return any(member.engine is not self._host for member in self.fleet.ready(policy))

    def own_version(self, policy: str) -> int | None:
        """Return the version that the own engine of the policy serves."""
        return self._host.engines[policy].version if self._host is not None else None

    # ------------------------------------------------------------ what the node reports

    def versions(self) -> dict[str, int] | None:
        """Return the lowest version that the engines of each policy serve; None while a policy has no engine."""
        return self.fleet.versions(self.pools)

    @property
    def trouble(self) -> str:
        """Why an own engine cannot sample with its weights; empty if it can."""
        return self._host.known.trouble if self._host is not None else ""

    async def newer(self, than: Mapping[str, int], seconds: float) -> None:
        """Wait until the engines serve other versions, for at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.versions() == than:
                    await self.fleet.changed(seconds)

    @property
    def own(self) -> bool:
        """True if all engines are in this process."""
        return self._roster is None

    def behind(self, heads: Mapping[str, int]) -> list[str]:
        """Return the policies whose weights this node could pull now. Engine processes pull their own."""
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
        """Request the roster, which may wait for a change. Returns False, and changes nothing, if it did not answer."""
        if self._roster is None:
            return False
        try:
            found = await self._roster(LookEngines(news=self._news, wait=wait))
        except RillflowError as error:
            log.warning("the roster of engines did not answer: %s", error.message)
            return False
        self._news = found.news
        self.fleet.follow(found.engines, self._open)
        return True

    def _open(self, info: EngineInfo) -> RemoteEngine:
        log.info("engine %s registered at %s", info.name, info.url)
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
    """Build the engines of a recipe.

    `weights` is the folder of all weight stores except those in `stores`. With `turn`, the nodes of a run update one
    after the other; `tell` is called with the downloads of a new version. A node that is `hosted` by a trainer always
    has an engine of its own. The activity of own engines is written to `spans`, by default to those of a worker with
    the node's name.
    """
    if recipe.rollout.engines and not hosted:
        return NodeEngines(recipe, name=name, token=token, roster=roster, clock=clock)
    exact = recipe.runtime.deterministic
    logs = weights.parent / "logs"
    turn = turn if recipe.rollout.staggered else None
    engines = build_engines(recipe.policies, exact=exact, logs=logs, whole=stores or ())
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
