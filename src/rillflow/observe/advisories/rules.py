"""All rules in the order in which their advisories are shown (causes before consequences), hints for healthy runs, and
`Watch`, which reports each problem of a running run once, when it appears.

Reading a run folder takes a moment, so `Watch` reads in a thread; the view never waits for it. A look that fails is
logged once and ends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import fmean

from rillflow.contracts import Clock, SystemClock
from rillflow.observe.advisories import learning, rollout
from rillflow.observe.advisories.advisory import SEVERITIES, Advisory, Facts, threshold
from rillflow.observe.advisories.fact_reader import FactReader
from rillflow.observe.advisories.learning import last, window
from rillflow.runtime.folder import RunFolder
from rillflow.types import Status


def trainer_waits(facts: Facts) -> Iterator[Advisory]:
    """In a colocated run trainers wait by design."""
    for policy, steps in facts.policies.items():
        waited = last(steps, lambda step: step.wait_fraction)
        if facts.settings.on_policy or waited is None or waited < threshold("trainer_waits") or len(steps) < window():
            continue
        yield Advisory(
            key="trainer_waits",
            severity="hint",
            title=f"The trainer of {policy} waits for data {waited:.0%} of its time.",
            why=f"mean of the last {window()} steps; `rillflow balance` has the numbers of the pool",
            what_to_do="Add rollout nodes (rollout.nodes) or episodes at once (rollout.episodes), or train on smaller "
            "batches.",
        )
        return


def nodes_wait(facts: Facts) -> Iterator[Advisory]:
    rollout = {worker: share for worker, share in facts.idle.items() if worker.startswith("rollout")}
    waited = [last(steps, lambda step: step.wait_fraction) or 0.0 for steps in facts.policies.values()]
    if not rollout or fmean(rollout.values()) < threshold("nodes_wait") or max(waited, default=1.0) > _BUSY:
        return
    worst = max(rollout, key=lambda worker: rollout[worker])
    yield Advisory(
        key="nodes_wait",
        severity="hint",
        title=f"The rollout nodes are idle {fmean(rollout.values()):.0%} of their time, {worst} {rollout[worst]:.0%}.",
        why=f"the trainer waits for data {max(waited):.0%} of its time, so it is the slower side",
        what_to_do="Use fewer rollout nodes, give the trainer more of the machine, or raise dataflow.staleness.",
    )


_BUSY = 0.2  # share of waiting above which the trainer is not the slower side


def dropped_stale(facts: Facts) -> Iterator[Advisory]:
    ended = sum(facts.ledger.groups.get(state, 0) for state in ("trained", "filtered", "expired", "failed"))
    expired = facts.ledger.groups.get("expired.stale", 0)
    if ended and expired / ended >= threshold("dropped_stale"):
        yield Advisory(
            key="dropped_stale",
            severity="hint",
            title=f"{expired} of {ended} groups became too old before they could be trained.",
            why=f"dataflow.staleness is {facts.settings.staleness}",
            what_to_do="Use fewer rollout nodes or episodes at once, or raise dataflow.staleness.",
        )


def flat_groups(facts: Facts) -> Iterator[Advisory]:
    filtered = facts.ledger.groups.get("filtered.zero_variance", 0)
    complete = filtered + facts.ledger.groups.get("trained", 0) + facts.ledger.groups.get("expired.stale", 0)
    if complete and filtered / complete >= threshold("flat_groups"):
        yield Advisory(
            key="flat_groups",
            severity="hint",
            title=f"{filtered} of {complete} groups had equal rewards and were dropped.",
            why="the filter zero_variance drops groups that have nothing to compare",
            what_to_do="Choose prompts of middle difficulty (curators: greso, curriculum), raise dataflow.group_size, "
            "or sample at a higher temperature.",
        )


Rule = Callable[[Facts], Iterator[Advisory]]

RULES: Sequence[Rule] = (
    rollout.full_disk,
    rollout.refused_weights,
    rollout.hanging,
    rollout.user_errors,
    rollout.failed_episodes,
    learning.too_high_rate,
    learning.length_hack,
    learning.equal_rewards,
    rollout.stall,
    rollout.silent,
    rollout.bad_end,
    rollout.forks,
    rollout.slow_node,
    rollout.failing_node,
    rollout.stale_node,
    rollout.lost_node,
    rollout.apart,
    learning.truncated_answers,
    learning.repeated_answers,
    learning.collapse,
    trainer_waits,
    nodes_wait,
    dropped_stale,
    flat_groups,
)


def advise(facts: Facts) -> list[Advisory]:
    """Return what to tell of a run, the gravest first; hints only where nothing is wrong."""
    found = [advisory for rule in RULES for advisory in rule(facts)]
    if any(advisory.severity != "hint" for advisory in found):
        found = [advisory for advisory in found if advisory.severity != "hint"]
    return sorted(found, key=lambda advisory: SEVERITIES.index(advisory.severity))


# ---------------------------------------------------------------- a run that is shown


log = logging.getLogger(__name__)

EVERY = 15.0  # seconds between two looks
_SHOWN_ANYWAY = ("user_error",)  # the view shows the traceback of each when it comes


class Watch:
    def __init__(self, folder: RunFolder, say: Callable[[str], None], *, clock: Clock | None = None) -> None:
        self._facts = FactReader(folder)
        self._say = say
        self._clock = clock or SystemClock()
        self._thread = ThreadPoolExecutor(1, "advisories")
        self._looking: Future[list[Advisory]] | None = None
        self._next = self._clock.monotonic() + EVERY
        self._said: set[str] = set(_SHOWN_ANYWAY)
        self._complained = False

    def look(self, status: Status) -> None:
        """Say what the last look has found, and look again where it is time to."""
        if self._looking is not None and self._looking.done():
            self._tell(self._looking)
            self._looking = None
        if self._looking is None and self._clock.monotonic() >= self._next and status.phase != "ended":
            self._next = self._clock.monotonic() + EVERY
            self._looking = self._thread.submit(self._advise, status)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _advise(self, status: Status) -> list[Advisory]:
        return advise(self._facts.read(status, now=self._clock.now()))

    def _tell(self, found: Future[list[Advisory]]) -> None:
        if error := found.exception():
            if not self._complained:
                log.warning("the run's advisories cannot be made: %s", error)
            self._complained = True
            return
        for advisory in found.result():
            if advisory.severity == "problem" and advisory.key not in self._said:
                self._said.add(advisory.key)
                self._say(f"problem: {advisory.title} {advisory.what_to_do}")
