"""Rules about rollout: failures of episodes and their causes, forks, a full disk, stalls and bad ends; wrong weights,
and nodes that are slow, failing or behind the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

from rillflow.dataflow.ledger_facts import NodeFacts
from rillflow.observe.advisories.advisory import Advisory, Facts, threshold
from rillflow.observe.advisories.learning import last, of_policy
from rillflow.types import MODEL_WAIT, SLOW_TOOL, UserError

_FAILURES = "failures."
_TIMEOUT = "timeout"

_TOOL = "tool "
_CURES = {
    "context_overflow": "Raise engine.context, or shorten prompts and histories.",
    "no_model_call": "Look at the workflow: it ends without calling the model, so nothing can be trained.",
    "record_incomplete": "Look at the node's log: parts of these sessions were lost.",
    "agent_error": "Read the end of a failed episode (`rillflow show`): the agent's command ended with an error.",
    "timeout": "Give the calls of the workflow deadlines of their own, or raise rollout.episode_timeout.",
}


def full_disk(facts: Facts) -> Iterator[Advisory]:
    told = facts.no_space or (facts.reason if "no space left" in facts.reason.lower() else "")
    low = facts.disk_free is not None and facts.disk_free < threshold("disk_free")
    if facts.ended_well or not (told or (low and facts.live)):
        return
    free = "how much is free is unknown" if facts.disk_free is None else f"{facts.disk_free:.1%} of it is free now"
    yield Advisory(
        key="full_disk",
        severity="problem",
        title=f"The disk of the run folder {'ran full' if told else 'is full'}: {free}.",
        why=told or f"less than {threshold('disk_free'):.0%} is left",
        what_to_do="Free space, then `rillflow resume RUN`: nothing that was acknowledged is lost.",
    )


def hanging(facts: Facts) -> Iterator[Advisory]:
    """Episodes that reach their deadline, and tools that reach theirs."""
    slow = next((error for error in facts.ledger.errors if error.kind.startswith(SLOW_TOOL)), None)
    timeouts = facts.ledger.counters.get(f"{_FAILURES}{_TIMEOUT}", 0) + facts.ledger.counters.get("ended.timeout", 0)
    share = timeouts / max(facts.episodes, 1)
    if slow is not None and slow.count >= threshold("tool_errors") * facts.episodes:
        tool = slow.kind.removeprefix(SLOW_TOOL)
        yield Advisory(
            key="hanging_tool",
            severity="problem",
            title=f"The tool {tool} hangs: {slow.count} of its calls reached their deadline.",
            why=f"{slow.error}; {facts.episodes} episodes have ended, {timeouts} of them at their own deadline",
            what_to_do=f"Give the calls that {tool} makes deadlines of their own, or see whether its server answers; "
            "`rillflow tools` calls it alone.",
        )
    elif timeouts < threshold("failed_count") or share < threshold("failed"):
        return
    elif MODEL_WAIT in facts.ledger.last_failure:
        yield Advisory(
            key="slow_model",
            severity="problem",
            title=f"Episodes wait too long for the model: {timeouts} of {facts.episodes} reached their deadline of "
            f"{facts.settings.episode_timeout:g} s in a model call.",
            why="; ".join([facts.ledger.last_failure, *facts.waits[:2]]),
            what_to_do="See whether the engines have weights and sample (`rillflow status`), play fewer episodes at "
            "once (rollout.episodes), add engines, or raise rollout.episode_timeout.",
        )
    else:
        where = next((error for error in facts.ledger.errors if error.kind == _TIMEOUT), None)
        place = f" at {where.where.partition(' ')[2]}" if where is not None and where.where else ""
        yield Advisory(
            key="hanging_tool",
            severity="problem",
            title=f"A tool or another call hangs{place}: {timeouts} of {facts.episodes} episodes reached their "
            f"deadline of {facts.settings.episode_timeout:g} s.",
            why=where.trace or where.error if where is not None else "the nodes' logs name the tasks",
            what_to_do="Give that call a deadline of its own and an answer for when it passes, or raise "
            "rollout.episode_timeout if episodes really take that long.",
        )


def user_errors(facts: Facts) -> Iterator[Advisory]:
    """Errors that user code raises, in workflows, rewards, tools and hooks."""
    for error in facts.ledger.errors:
        share = error.count / max(facts.episodes, 1)
        many = error.count >= threshold("failed_count") and share >= threshold("failed")
        if error.kind.startswith(SLOW_TOOL) or error.kind == _TIMEOUT or not many:
            continue
        yield Advisory(
            key="user_error",
            severity="warning" if error.kind.startswith(_TOOL) else "problem",
            title=f"{_whose(error)} raised {error.error.rstrip('.')}, {error.count} times in {facts.episodes} "
            "episodes.",
            why=error.trace or error.where or "the nodes' logs have the traceback",
            what_to_do="Fix the line that the traceback names; `rillflow try` plays one episode with your change.",
        )


def _whose(error: UserError) -> str:
    if error.kind.startswith(_TOOL):
        return f"The {error.kind}"
    names = {"workflow_error": "The workflow", "reward_error": "The reward", "context_overflow": "A model call"}
    return names.get(error.kind, f"User code ({error.kind})")


def failed_episodes(facts: Facts) -> Iterator[Advisory]:
    """Many episodes fail, for one cause or for several."""
    failed = facts.ledger.failed
    found = {name: count for name, count in facts.ledger.counters.items() if name.startswith(_FAILURES) and count}
    raised = sum(found.get(f"{_FAILURES}{kind}", 0) for kind in {error.kind for error in facts.ledger.errors})
    if failed < threshold("failed_count") or failed - raised < threshold("failed") * facts.episodes:
        return  # `user_errors` reports those that user code raised
    causes = sorted(((name.removeprefix(_FAILURES), count) for name, count in found.items()), key=lambda one: -one[1])
    listed = ", ".join(f"{cause} {count}" for cause, count in causes)
    yield Advisory(
        key="failed_episodes",
        severity="problem",
        title=f"{failed} of {facts.episodes} episodes failed{f' ({listed})' if listed else ''}.",
        why=f"{facts.ledger.completed} episodes have ended well",
        what_to_do=_CURES.get(causes[0][0] if causes else "", "Read a failed episode (`rillflow show`) and its log."),
    )


def forks(facts: Facts) -> Iterator[Advisory]:
    """Every call begins a new path, so each one is a sample that repeats what it shares with the others."""
    found, note = facts.ledger.episodes, facts.ledger.notes.get("forks", "")
    if found is None or not note or found.forks < threshold("forks") * (found.calls - 1):
        return
    cause = note.partition(": ")[2].partition("; ")[0] or note
    apart_by_design = cause.startswith("the user's message differs") and "messages[0]" in cause
    yield Advisory(
        key="forks",
        severity="hint" if apart_by_design else "warning",
        title=f"Every turn forks a new path ({found.forks:.1f} forks in {found.calls:.1f} calls): {cause}.",
        why=f"an episode forwards {found.forwarded:.0f} tokens to train {found.trained:.0f}",
        what_to_do=_ONE_TEMPLATE if "template" in cause else _SAME_HISTORY,
    )


_SAME_HISTORY = (
    "Keep that part of the history the same between calls (no clock, no counter, no shortened messages), or set "
    "trainer.trees: true so that what paths share is computed once."
)
_ONE_TEMPLATE = (
    "Use a chat template that writes earlier messages the same at every turn (many drop the reasoning of earlier "
    "answers), or set trainer.trees: true so that what paths share is computed once."
)


def stall(facts: Facts) -> Iterator[Advisory]:
    """A live run that makes no step for much longer than before."""
    times = sorted(step.time for steps in facts.policies.values() for step in steps if step.time is not None)
    since = max([*times[-1:], *([] if facts.started is None else [facts.started])], default=None)
    if not facts.live or since is None:
        return
    longest = max((later - sooner for sooner, later in pairwise(times[-_PAUSES:])), default=0.0)
    patience = max(threshold("stall"), 5 * longest) if times else threshold("first_step")
    waited = facts.now - since
    if waited <= patience:
        return
    what = facts.waits[0] if facts.waits else "the service does not say for what"
    yield Advisory(
        key="stall",
        severity="problem",
        title=f"No optimizer step for {waited:.0f} s: {what}.",
        why="; ".join(facts.waits[1:4]) or f"the longest pause between two steps was {longest:.0f} s",
        what_to_do="Look at the process that is waited for (`rillflow status`, RUN/logs); `rillflow nodes` shows who "
        "plays what.",
        since=since,
    )


_PAUSES = 32  # steps whose pauses are compared


def silent(facts: Facts) -> Iterator[Advisory]:
    """A run whose state is `running` although none of its processes lives."""
    if facts.live or facts.held or facts.state != "running":
        return
    signs = [step.time for steps in facts.policies.values() for step in steps[-1:] if step.time is not None]
    signs += [node.seen for node in facts.ledger.nodes]
    heard = max(signs, default=facts.started)
    if heard is not None and facts.now - heard > threshold("silence"):
        yield Advisory(
            key="silent",
            severity="problem",
            title=f"The run was ended without a word: its last sign of life is {facts.now - heard:.0f} s old.",
            why="state.json says that it is running, and none of its processes does",
            what_to_do="`rillflow resume RUN` goes on where it was; if it was killed for memory, give it less to do.",
            since=heard,
        )


def bad_end(facts: Facts) -> Iterator[Advisory]:
    if facts.state == "failed":
        reason = next(iter(facts.reason.splitlines()), "no reason was written down")[:300].rstrip(".")
        yield Advisory(
            key="failed",
            severity="problem",
            title=f"The run failed: {reason}.",
            why=f"{facts.ledger.completed} episodes had ended well, {facts.ledger.failed} badly",
            what_to_do="Mend what it names (the logs are in RUN/logs), then `rillflow resume RUN` goes on.",
        )


# ---------------------------------------------------------------- engines and nodes


_WEIGHT_CURES = {
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
            what_to_do=_WEIGHT_CURES[one.cause],
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
            what_to_do=_NUMERICS if cause == "numerics" else _WEIGHT_CURES[cause],
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
