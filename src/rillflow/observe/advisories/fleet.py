"""Rules about engines and rollout nodes: wrong weights, and nodes that are slow, failing or behind the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from rillflow.dataflow.ledger_facts import NodeFacts
from rillflow.observe.advisories.advisory import Advisory, threshold
from rillflow.observe.advisories.facts import Facts
from rillflow.observe.advisories.learning import last, of_policy

_CURES = {
    "numerics": "Give engine.dtype and trainer.dtype the same precision and look for a quantised cache; if the "
    "difference is wanted, set weights.probe to a larger tolerance.",
    "stale weights": "Restart the engine: the update did not reach what it computes with.",
    "cut distribution": "Take temperature, top_p, top_k and a generation config out of the server's arguments.",
    "a cut distribution": "Take top_p, top_k and a generation config out of the engine's own options, and compare "
    "policies.*.sampling with what the agents' calls ask for (sampling.wins).",
    "wrong weights": "Compare policies.*.model with what this engine was started with, then restart it: its tensors "
    "are missing, outdated, in each other's places or of another model.",
}


def refused_weights(facts: Facts) -> Iterator[Advisory]:
    """An engine did not reproduce the log-probs that its trainer published, and serves nothing."""
    for one in facts.refusals:
        yield Advisory(
            key="refused_weights",
            severity="problem",
            title=f"The engine of {one.worker} serves nothing because it has {one.cause}: it does not reproduce "
            f"version {one.version}{of_policy(facts, one.policy)}.",
            why=one.why,
            what_to_do=_CURES[one.cause],
        )


def apart(facts: Facts) -> Iterator[Advisory]:
    """Engine and trainer give different log-probs to the same tokens under the same weights."""
    for policy, steps in facts.policies.items():
        found = last(steps, lambda step: step.apart)
        if found is None or found <= threshold("apart"):
            continue
        cause, signs = _cause(facts, policy, found)
        yield Advisory(
            key="apart",
            severity="warning",
            title=f"Engine and trainer{of_policy(facts, policy)} are {found:.2g} nats apart on tokens of the same "
            f"version, most likely because of {cause}.",
            why=f"up to {threshold('apart'):g} is usual; {signs}",
            what_to_do=_NUMERICS if cause == "numerics" else _CURES[cause],
        )


_NUMERICS = (
    "Give engine.dtype and trainer.dtype the same precision, take quantisation out of the engine, or correct for the "
    "difference with trainer.truncate: 2."
)


def _cause(facts: Facts, policy: str, apart_by: float) -> tuple[str, str]:
    """Return the likely cause of a difference, and the numbers that speak for it.

    Rounding errors have no direction. An engine that cuts its distribution, or that has other weights, gives what it
    samples a higher probability than the trainer does: the difference is nearly all of one sign. Weights that do not
    follow the trainer's are as far from it as those of the version before. A probe that passed rules weights out.
    """
    steps, settings = facts.policies[policy], facts.settings
    shift = last(steps, lambda step: step.shift) or 0.0
    stale = last(steps, lambda step: step.stale_apart)
    probed, cut = settings.probed.get(policy, True), settings.cuts.get(policy, "")
    one_sided = shift < -threshold("one_sided") * apart_by
    proof = "the probes passed, so the weights are the right ones" if probed else "weights.probe is off"
    signs = f"the engine gives its tokens {-shift:.2g} nats more than the trainer; {proof}"
    if not probed and stale is not None and threshold("as_stale") * stale <= apart_by <= stale / threshold("as_stale"):
        return "stale weights", f"tokens of older versions are as far apart ({stale:.2g} nats); {proof}"
    if not probed and one_sided and apart_by > threshold("other_weights"):
        return "wrong weights", signs
    if one_sided:
        return "a cut distribution", f"{signs}; the recipe samples with {cut}" if cut else signs
    engine, trainer = settings.dtypes.get(policy, ("unknown", "unknown"))
    return "numerics", f"engine.dtype is {engine}, trainer.dtype {trainer}; the differences have no direction; {proof}"


def slow_node(facts: Facts) -> Iterator[Advisory]:
    """A node whose episodes take many times as long as those of the others."""
    paced = [(node, node.pace) for node in _measured(facts) if node.pace is not None]
    if len(paced) < 2:
        return
    worst, pace = max(paced, key=lambda one: one[1])
    others = [seconds for node, seconds in paced if node is not worst]
    usual = median(others)
    if usual <= 0 or pace < threshold("slow_node") * usual:
        return
    yield Advisory(
        key="slow_node",
        severity="warning",
        title=f"Node {worst.name} is {pace / usual:.1f} times slower than the others: {pace:.2g} s for an episode "
        f"instead of {usual:.2g} s.",
        why=f"the fleet's mean is {fmean([pace, *others]):.2g} s over {len(paced)} nodes; {worst.name} has completed "
        f"{worst.completed} of {sum(node.completed for node, _ in paced)} episodes",
        what_to_do=f"Look at what else runs on the machine of {worst.name} and at its log, or send it away "
        "(`rillflow nodes`): it gets fewer tasks, but its last ones hold up whole groups.",
    )


def failing_node(facts: Facts) -> Iterator[Advisory]:
    """A node whose episodes fail while those of the others do not."""
    for node in _measured(facts):
        others = [other for other in _measured(facts) if other is not node]
        mine, theirs = _failing([node]), _failing(others)
        if not others or mine < threshold("failing_node") or theirs > mine / 2:
            continue
        yield Advisory(
            key="failing_node",
            severity="warning",
            title=f"{mine:.0%} of the episodes on node {node.name} fail, and {theirs:.0%} on the others.",
            why=f"{node.failed} failed and {node.completed} completed on {node.name}",
            what_to_do=f"Read the log of {node.name} (RUN/logs/{node.name}.log): something there differs from the "
            "other nodes (a missing tool, no network, a full disk).",
        )


def stale_node(facts: Facts) -> Iterator[Advisory]:
    """A node that serves weights far behind the newest."""
    if not facts.live:
        return
    for node in facts.ledger.nodes:
        behind = max((facts.ledger.heads.get(name, at) - at for name, at in node.versions.items()), default=0)
        if node.state != "healthy" or behind <= facts.settings.staleness + threshold("stale_versions"):
            continue
        yield Advisory(
            key="stale_node",
            severity="warning",
            title=f"Node {node.name} is {behind} versions behind the newest weights.",
            why=f"the recipe bounds staleness to {facts.settings.staleness}; its samples are refused or dropped",
            what_to_do=f"Look in the log of {node.name} for why it does not load newer weights (a slow disk, a slow "
            "network: `rillflow relay`).",
        )


def lost_node(facts: Facts) -> Iterator[Advisory]:
    """A node without heartbeats, while the run goes on."""
    gone = [node for node in facts.ledger.nodes if node.state == "gone"] if facts.live else []
    if gone:
        names = ", ".join(node.name for node in gone[:3])
        yield Advisory(
            key="lost_node",
            severity="warning",
            title=f"{len(gone)} of {len(facts.ledger.nodes)} rollout nodes are not heard of any more: {names}.",
            why=f"the last sign of {gone[0].name} came {max(facts.now - gone[0].seen, 0.0):.0f} s ago",
            what_to_do="Look at its machine and its log; its tasks have been given to the others.",
        )


def _measured(facts: Facts) -> list[NodeFacts]:
    """Return the nodes that have ended enough episodes to be judged."""
    return [node for node in facts.ledger.nodes if node.completed + node.failed >= threshold("node_episodes")]


def _failing(nodes: Sequence[NodeFacts]) -> float:
    ended = sum(node.completed + node.failed for node in nodes)
    return sum(node.failed for node in nodes) / ended if ended else 0.0
