"""Rules about the flow of episodes: failures and their causes, forks, a full disk, stalls and bad ends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from rillflow.observe.advisories.advisory import Advisory, threshold
from rillflow.observe.advisories.facts import Facts
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
