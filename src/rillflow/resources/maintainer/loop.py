"""The maintainer's loop: looks at the run every few seconds, and on each new balance report decides once.

A decision and the number of its report are one write; the execution follows and can be interrupted and continued
(`upkeep`). So each report is acted on at most once, whatever is killed. Nothing is decided while nodes are joining
(their weights are still being transferred) or leaving, nor within the cooldown: a report that comes then is answered
with `hold`, and the next one sees a stable pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rillflow.config.runs import ScalingConfig
from rillflow.contracts import Clock, Executor, SystemClock
from rillflow.errors import RillflowError, RunError, StorageError
from rillflow.resources.maintainer.pool import (
    REMEMBERED,
    Action,
    Asked,
    Book,
    Busy,
    Line,
    Member,
    State,
    Wish,
    keep_rates,
    nodes_for,
    size,
    starves,
    victims,
    wish,
)
from rillflow.resources.maintainer.upkeep import MARGIN, MOST_FAILURES, Look, NoWorkers, Run, Upkeep, Workers
from rillflow.types.balance import Balance, Report

log = logging.getLogger(__name__)

POLL = 2.0
END_GRACE = 30.0  # seconds that nodes have to see the end of the run themselves
PATIENCE = 600.0  # seconds without an answer of the run after which a maintainer gives up


@dataclass(frozen=True)
class Outcome:
    """The result of a request: whether it was carried out, and if not, why."""

    done: bool
    why: str
    target: int
    nodes: Sequence[str] = ()


class Maintainer:
    """Maintains one run. With `follow` it acts on reports; without, only on requests (`resize`, `retire`)."""

    def __init__(
        self,
        run: Run,
        executor: Executor,
        book: Book,
        scaling: ScalingConfig,
        *,
        start_timeout: float,
        workers: Workers | None = None,
        follow: bool = True,
        clock: Clock | None = None,
        say: Callable[[Line], None] = lambda line: None,
    ) -> None:
        clock = clock or SystemClock()
        self._upkeep = Upkeep(book, run, executor, scaling, clock, start_timeout, workers or NoWorkers(), say)
        self._upkeep.awaited = dict.fromkeys(self._upkeep.workers.playing(), clock.now() + start_timeout)
        self._run, self._executor, self._scaling, self._clock = run, executor, scaling, clock
        self._book, self._follow, self._start_timeout = book, follow, start_timeout
        self._busy = Busy()
        self._noticed: dict[str, float] = {}
        self._ended: float | None = None
        self._turn = asyncio.Lock()
        self.advice: Wish | None = None  # on the latest report

    @property
    def state(self) -> State:
        return self._book.state

    async def run(self, poll: float = POLL) -> None:
        """Maintain until the run and its nodes have ended. A run that does not answer is waited for."""
        heard = self._clock.monotonic()
        while True:
            try:
                if not await self.tick():
                    return
                heard = self._clock.monotonic()
            except StorageError:
                raise  # an action that cannot be recorded must not be carried out
            except RillflowError as error:
                log.warning("this round was cut short: %s", error)
                if self._clock.monotonic() - heard > PATIENCE:
                    raise RunError(
                        f"the run has not answered for {PATIENCE:.0f} s", "is its dataflow service still there?"
                    ) from error
            await asyncio.sleep(poll)

    async def tick(self) -> bool:
        """Do one round. Return False once nothing is left to maintain."""
        async with self._turn:
            if self._ended is None and await self._run.ended():
                self._ended = self._clock.now()
            if self._ended is not None:
                look = Look(self._clock.now(), (), await self._executor.nodes(), None)
                return not (self._scaling.dry_run or await self._upkeep.finish(look, self._ended, END_GRACE))
            look = await self._look()
            self._busy.look(look.infos)
            if not self._scaling.dry_run:
                await self._upkeep.settle(look)
            self._begin(look)
            await self._on_report(look)
            if not self._scaling.dry_run:
                await self._upkeep.refill(look)
            return True

    async def _look(self) -> Look:
        balance, infos = await self._run.balance(), await self._run.nodes()
        return Look(self._clock.now(), infos, await self._executor.nodes(), balance.latest)

    def _begin(self, look: Look) -> None:
        """Adopt the present pool as the target, until a report asks for another."""
        if self.state.target is None:
            found = size(self._upkeep.pool(look))
            self.state.target = self._upkeep.clamped(found)
            self._upkeep.note("begin", f"there are {found} nodes, and {self._bounds} are allowed", found)

    # ------------------------------------------------------------ reports

    async def _on_report(self, look: Look) -> None:
        report = look.report
        if report is None or report.version <= self.state.report:
            return
        asked = self.advice = wish(report, self._busy.share())
        self._busy = Busy()
        self.state.report = report.version
        self.state.rates = keep_rates(self.state.rates, report)
        pool = self._upkeep.pool(look)
        if starves(report):
            self.state.starved, self.state.remembered = size(pool), REMEMBERED
        else:
            self.state.remembered = max(self.state.remembered - 1, 0)
        if self._follow:
            await self._decide(look, pool, report, asked)
        else:
            self._book.commit()

    async def _decide(self, look: Look, pool: list[Member], report: Report, asked: Wish) -> None:
        """Decide on this report, once."""
        now, current = look.time, size(pool)
        following = Asked(report.version, asked.branch, asked.target)
        wanted = self._wanted(asked, pool)
        if asked.branch == "grow" and self.state.failures >= MOST_FAILURES:
            self.state.failures, self.state.retry = MOST_FAILURES - 1, now  # one more try for each report
        held = self._unready(pool, now)
        picks = [] if held else self._picks(pool, current - wanted, asked.target if asked.branch == "shrink" else 0)
        if held or (wanted <= current and not picks):
            why = held or (f"{asked.why}; no node that may go" if wanted < current else asked.why)
            self._upkeep.note("hold", why, current, asked=following)
            return
        wanted = max(wanted, current - len(picks))
        await self._change(look, wanted, picks, asked.why, asked=following)

    def _wanted(self, asked: Wish, pool: Sequence[Member]) -> int:
        """Return the wanted number of nodes, within the bounds."""
        current = size(pool)
        if asked.branch == "hold":
            return self._upkeep.clamped(current)
        wanted = self._upkeep.clamped(nodes_for(asked.target, pool))
        if asked.idle and self.state.remembered and wanted <= self.state.starved:
            wanted = min(self.state.starved + 1, current)
        return wanted

    def _picks(self, pool: Sequence[Member], count: int, gpus: int) -> list[Member]:
        spare = sum(member.gpus for member in pool if member.counts) - gpus
        return victims(pool, count, spare) if count > 0 else []

    def _unready(self, pool: Sequence[Member], now: float) -> str:
        """Return why nothing may change now; empty if the pool is stable."""
        starting = [m.name for m in pool if m.standing == "starting" and self._patient(m, now)]
        if starting:
            return f"still starting, or without weights: {', '.join(sorted(starting))}"
        if self.state.leaving:
            return f"still leaving: {', '.join(sorted(self.state.leaving))}"
        changed = self.state.changed
        if changed is not None and now - changed < self._scaling.cooldown:
            left = self._scaling.cooldown - (now - changed)
            return f"cooling down: {left:.0f} of {self._scaling.cooldown:.0f} s are left"
        return ""

    def _patient(self, member: Member, now: float) -> bool:
        """Return whether to wait for a node that has no weights yet. The wait for a foreign node is bounded."""
        since = self._noticed.setdefault(member.name, now)
        return member.kind == "own" or now - since <= self._start_timeout

    async def _change(
        self, look: Look, wanted: int, picks: Sequence[Member], why: str, *, asked: Asked, by: str = "loop"
    ) -> None:
        """Record the new target, then begin to carry it out."""
        current, names = size(self._upkeep.pool(look)), [member.name for member in picks]
        if not self._scaling.dry_run:
            self.state.target, self.state.changed = wanted, look.time
            for member in picks:
                if member.kind == "own":
                    self.state.nodes[member.name].leaving = look.time + self._scaling.drain + MARGIN
                elif member.kind == "run":
                    self.state.released.append(member.name)
        action: Action = "grow" if wanted > current else "shrink"
        self._upkeep.note(action, f"{current} to {wanted} nodes: {why}", current, names, asked=asked, by=by)
        if not self._scaling.dry_run:
            for member in picks:
                await self._retire(member)

    async def _retire(self, member: Member) -> None:
        if member.kind == "run":
            self._upkeep.workers.take(member.name)
            return
        try:
            await self._run.retire(member.name, self._scaling.drain)
        except RillflowError as error:
            log.warning("%s is asked again to leave: %s", member.name, error)

    # ------------------------------------------------------------ what an agent may do

    @property
    def _bounds(self) -> str:
        return f"{self._scaling.least} to {self._scaling.most}"

    async def look(self) -> tuple[Balance, Sequence[Member], Look]:
        """Return the present state; changes nothing."""
        async with self._turn:
            balance, look = await self._run.balance(), await self._look()
            return balance, self._upkeep.pool(look), look

    async def resize(self, wanted: int | None = None, *, more: int = 0, by: str = "agent") -> Outcome:
        """Set the pool to `wanted` nodes, or `more` than now: within the bounds, after the cooldown, if it is
        stable."""
        async with self._turn:
            look = await self._look()
            pool = self._upkeep.pool(look)
            current = size(pool)
            wanted = current + more if wanted is None else wanted
            if refusal := self._refusal(look, pool, wanted):
                return self._refuse(look, refusal, by)
            if wanted == current:
                return Outcome(True, f"there are {current} nodes already", current)
            picks = victims(pool, current - wanted, 1 << 30) if wanted < current else []
            if wanted < current - len(picks):
                return self._refuse(look, f"only {len(picks)} of the {current} nodes may be retired", by)
            await self._change(look, wanted, picks, "asked for", by=by, asked=Asked(self.state.report))
            await self._refill(look)
            return self._done(wanted, picks)

    async def retire(self, name: str, *, by: str = "agent") -> Outcome:
        """Drain this node and stop it. One that was started by hand exits after draining."""
        async with self._turn:
            look = await self._look()
            pool = self._upkeep.pool(look)
            found = next((member for member in pool if member.name == name), None)
            if found is None or not found.counts:
                here = ", ".join(sorted(member.name for member in pool if member.counts)) or "none"
                return self._refuse(look, f"node {name} cannot be retired; these can: {here}", by)
            wanted = size(pool) - 1
            if refusal := self._refusal(look, pool, wanted):
                return self._refuse(look, refusal, by)
            await self._change(look, wanted, [found], "asked for", by=by, asked=Asked(self.state.report))
            return self._done(wanted, [found])

    def lines(self, last: int) -> list[Line]:
        return self._book.lines(last)

    def _refusal(self, look: Look, pool: Sequence[Member], wanted: int) -> str:
        if wanted != self._upkeep.clamped(wanted):
            return f"{wanted} nodes are outside of the bounds: {self._bounds} (resources.scaling.least, most)"
        return self._unready(pool, look.time)

    def _refuse(self, look: Look, why: str, by: str) -> Outcome:
        self._upkeep.note("refused", why, size(self._upkeep.pool(look)), by=by, asked=Asked(self.state.report))
        return Outcome(False, why, self.state.target or 0)

    async def _refill(self, look: Look) -> None:
        if not self._scaling.dry_run:
            self.state.failures, self.state.retry = 0, 0.0  # the operator has looked at it
            await self._upkeep.refill(look)

    def _done(self, wanted: int, picks: Sequence[Member]) -> Outcome:
        names = [member.name for member in picks] or self.state.starting
        if self._scaling.dry_run:
            return Outcome(False, "dry run: it is only written down", wanted, names)
        return Outcome(True, "it is being done: see list_nodes", wanted, names)
