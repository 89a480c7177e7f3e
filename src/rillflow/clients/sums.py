"""What several ledgers say of one run, as one answer.

Every step is in every ledger, and the first ledger's numbers of steps are those of whole batches: they stand as they
are. Groups, tasks and episodes are in one ledger each: they are added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from rillflow.types import Batch, BatchReply, NodeInfo, NodeList, Phase, Status, TrainerJoined, UserError

SEPARATOR = "+"  # between the names of a batch's parts


def sum_status(parts: Sequence[Status]) -> Status:
    """Return the status of the run; a wait that only one ledger knows says which."""
    first = parts[0]
    phase, reason = sum_phase(parts)
    seen = [wait for part in parts for wait in set(part.waits)]
    waits = [
        wait if seen.count(wait) > 1 else f"ledger {number}: {wait}"
        for number, part in enumerate(parts)
        for wait in part.waits
    ]
    policies = {
        name: replace(policy, ready=sum(part.policies[name].ready for part in parts if name in part.policies))
        for name, policy in first.policies.items()
    }
    return replace(
        first,
        phase=phase,
        reason=reason,
        counts=dict(sum((Counter(part.counts) for part in parts), Counter())),
        nodes=max(part.nodes for part in parts),
        waits=list(dict.fromkeys(waits)),
        policies=policies,
        units=sum(part.units for part in parts),
        notes={subject: note for part in reversed(parts) for subject, note in part.notes.items()},
        errors=_sum_errors(parts),
    )


def sum_phase(parts: Sequence[Status]) -> tuple[Phase, str]:
    """Return the phase of the run and why: it has ended when all have, and ends when one does."""
    ending = [part for part in parts if part.phase != "training"]
    if not ending:
        return "training", ""
    return "ended" if all(part.phase == "ended" for part in parts) else "finishing", ending[0].reason


def _sum_errors(parts: Sequence[Status]) -> list[UserError]:
    found: dict[tuple[str, str], UserError] = {}
    for error in (error for part in parts for error in part.errors):
        known = found.get((error.kind, error.where))
        found[error.kind, error.where] = error if known is None else replace(known, count=known.count + error.count)
    return sorted(found.values(), key=lambda error: -error.count)


def sum_nodes(parts: Sequence[NodeList]) -> NodeList:
    """Return every node once, with its numbers summed over all ledgers."""
    found: dict[str, NodeInfo] = {}
    for node in (node for part in parts for node in part.nodes):
        known = found.get(node.name)
        found[node.name] = node if known is None else _sum_node(known, node)
    return NodeList(nodes=list(found.values()))


def _sum_node(one: NodeInfo, other: NodeInfo) -> NodeInfo:
    newer = one if one.seen <= other.seen else other
    paces = [node.pace for node in (one, other) if node.pace is not None]
    return replace(
        newer,
        leaving=one.leaving or other.leaving,
        held=one.held + other.held,
        completed=one.completed + other.completed,
        failed=one.failed + other.failed,
        pace=sum(paces) / len(paces) if paces else None,
        throughput=one.throughput + other.throughput,
    )


def sum_joined(parts: Sequence[TrainerJoined]) -> TrainerJoined:
    """Return what a trainer that joins goes on with. No ledger has used a version above `highest`."""
    return TrainerJoined(
        version=parts[0].version,
        highest=max(part.highest for part in parts),
        steps=parts[0].steps,
        orphaned=sorted({version for part in parts for version in part.orphaned}),
        rolled_back=sum(part.rolled_back for part in parts),
    )


def sum_batch(parts: Sequence[Batch]) -> Batch:
    """Return one batch of the parts. Its name names them; their groups are numbered on."""
    samples, groups = [], 0
    for part in parts:
        samples += [replace(sample, member=sample.member + groups) for sample in part.samples]
        groups += part.groups
    return replace(
        parts[0],
        id=SEPARATOR.join(part.id for part in parts),
        samples=samples,
        seconds=min(part.seconds for part in parts),
        groups=groups,
        complete=all(part.complete for part in parts),
        keep=[task for part in parts for task in part.keep],
    )


def sum_waiting(parts: Sequence[BatchReply]) -> BatchReply:
    """Return what a trainer waits for that does not have all parts of its batch yet."""
    phase: Phase = next((part.phase for part in parts if part.phase != "training"), "training")
    waits = [
        f"ledger {number}: {part.waiting_for}"
        for number, part in enumerate(parts)
        if part.batch is None and not part.spent
    ]
    return BatchReply(batch=None, phase=phase, waiting_for="; ".join(waits) or parts[0].waiting_for)
