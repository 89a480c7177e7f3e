"""The rules in the order in which their advisories are shown: causes before what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rillflow.observe.advisories import fleet, flow, hints, learning
from rillflow.observe.advisories.advisory import SEVERITIES, Advisory
from rillflow.observe.advisories.facts import Facts

Rule = Callable[[Facts], Iterator[Advisory]]

RULES: Sequence[Rule] = (
    flow.full_disk,
    fleet.refused_weights,
    flow.hanging,
    flow.user_errors,
    flow.failed_episodes,
    learning.too_high_rate,
    learning.length_hack,
    learning.equal_rewards,
    flow.stall,
    flow.silent,
    flow.bad_end,
    flow.forks,
    fleet.slow_node,
    fleet.failing_node,
    fleet.stale_node,
    fleet.lost_node,
    fleet.apart,
    learning.truncated_answers,
    learning.repeated_answers,
    learning.collapse,
    hints.trainer_waits,
    hints.nodes_wait,
    hints.dropped_stale,
    hints.flat_groups,
)


def advise(facts: Facts) -> list[Advisory]:
    """Return what to tell of a run, the gravest first; hints only where nothing is wrong."""
    found = [advisory for rule in RULES for advisory in rule(facts)]
    if any(advisory.severity != "hint" for advisory in found):
        found = [advisory for advisory in found if advisory.severity != "hint"]
    return sorted(found, key=lambda advisory: SEVERITIES.index(advisory.severity))
