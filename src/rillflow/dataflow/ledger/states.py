"""The state machine of the ledger: every state that a row may be in, and every event that moves it to another.

This table is the only list of states. The audit's identities, the drawings in docs/dataflow.md and the test that
watches every move of the ledger are made from it. `python -m rillflow.dataflow.ledger.states docs/dataflow.md` draws
them again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ADMITTED = ""  # the state before the first
REMOVED = "(removed)"  # the row is deleted


@dataclass(frozen=True)
class Move:
    """A row in `state` goes to `next` when `event` happens. `causes` are the ones that the row may be given."""

    state: str
    event: str
    next: str
    causes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """The states of one table's rows. A row in one of `ends` has reached its end, unless a rollback or a lost payload
    takes it back. Rows in `caused` must say why."""

    meaning: str
    moves: tuple[Move, ...]
    ends: tuple[str, ...] = ()
    caused: tuple[str, ...] = ()

    @cached_property
    def states(self) -> tuple[str, ...]:
        """All states, in the order in which the table names them."""
        named = [state for move in self.moves for state in (move.state, move.next)]
        return tuple(state for state in dict.fromkeys(named) if state not in (ADMITTED, REMOVED))

    @cached_property
    def open(self) -> tuple[str, ...]:
        """The states from which a row still moves on."""
        return tuple(state for state in self.states if state not in self.ends)


_AGAIN = ("rolled_back", "stale", "damaged", "unit_gone", "payload_gone")
_UNWANTED = ("surplus", "policy_done", "run_ended")
_EARLY = ("group_deadline", "run_ended", "stale", "rolled_back")
_RETURNED = ("node_left", "stopped", "stale", "rolled_back")
_LOST = ("lease_expired", "node_gone", "node_restarted", "payload_gone")

MACHINES: dict[str, Machine] = {
    "groups": Machine(
        "the tasks of one admitted prompt; the audit counts each prompt by the state of its group",
        (
            Move(ADMITTED, "the prompt is admitted", "playing"),
            Move("playing", "all tasks have ended, a share is ready", "open"),
            Move("playing", "all tasks have ended, no share is kept", "filtered", ("no_stream", "too_few", "FILTER")),
            Move("playing", "too few tasks are done", "failed", ("the task's cause",)),
            Move("playing", "a filter raised", "failed", ("filter_error",)),
            Move("playing", "nobody can take it any more", "expired", ("stale", "run_ended", "policy_done")),
            Move("playing", "an evaluation's tasks have ended", "evaluated"),
            Move("open", "its shares have ended, one is trained", "trained"),
            Move("open", "its shares have ended, none is trained", "expired", ("the share's cause",)),
            Move("open", "tasks of it are played again", "playing", _AGAIN),
            Move("trained", "its version is rolled back", "open", ("rolled_back",)),
            Move("trained", "its version is rolled back, its rows are gone", "playing", ("payload_gone",)),
        ),
        ends=("trained", "filtered", "expired", "failed", "evaluated"),
        caused=("filtered", "expired", "failed"),
    ),
    "shares": Machine(
        "the samples of a complete group for one stream",
        (
            Move(ADMITTED, "its group is complete", "ready"),
            Move(ADMITTED, "a filter drops it", "filtered", ("too_few", "FILTER")),
            Move(ADMITTED, "a filter raised", "failed", ("filter_error",)),
            Move(ADMITTED, "its stream has done its steps", "expired", ("policy_done",)),
            Move("ready", "a batch takes it", "leased"),
            Move("leased", "the batch is committed", "trained"),
            Move("leased", "the batch is released", "ready"),
            Move("trained", "its version is rolled back", "ready", ("rolled_back",)),
            Move("ready", "it is too old, too much or lost", "expired", (*_AGAIN, *_UNWANTED)),
            Move("ready", "tasks of its group are played again", REMOVED, _AGAIN),
        ),
        ends=("trained", "filtered", "expired", "failed"),
        caused=("filtered", "expired", "failed"),
    ),
    "tasks": Machine(
        "one episode to play",
        (
            Move(ADMITTED, "its group is admitted", "pending"),
            Move("pending", "a node leases it", "leased"),
            Move("leased", "the episode is completed", "done"),
            Move("leased", "the episode fails, attempts are left", "pending", ("the node's cause",)),
            Move("leased", "the lease is returned or lost", "pending", (*_RETURNED, *_LOST)),
            Move(
                "leased", "the last attempt fails, or too many leases are lost", "failed", ("the node's cause", *_LOST)
            ),
            Move("leased", "its group ends early", "cancelled", _EARLY),
            Move("pending", "its group ends early", "cancelled", _EARLY),
            Move("done", "it is played again", "pending", _AGAIN),
            Move("done", "its group's reward fails", "failed", ("reward_error",)),
        ),
        ends=("done", "failed", "cancelled"),
    ),
    "attempts": Machine(
        "one lease of a task: in the row of its task while it holds it or has done it, else in ended_attempts",
        (
            Move(ADMITTED, "a node leases the task", "held"),
            Move("held", "the episode is completed", "done"),
            Move("held", "the episode fails", "failed", ("the node's cause", "no_model_call", "bad_reward")),
            Move("held", "the lease is returned or lost", "returned", (*_RETURNED, *_LOST)),
            Move("held", "the task is cancelled", "cancelled", _EARLY),
            Move("done", "the task is played again", "returned", _AGAIN),
            Move("done", "the group's reward fails", "failed", ("reward_error",)),
        ),
        ends=("done", "failed", "returned", "cancelled"),
        caused=("failed", "returned", "cancelled"),
    ),
    "batches": Machine(
        "shares leased to a trainer for one step",
        (
            Move(ADMITTED, "a trainer asks, enough is ready", "leased"),
            Move("leased", "the step is committed", "committed"),
            Move("leased", "the lease ends otherwise", "released"),
            Move("committed", "its version is rolled back", "rolled_back"),
        ),
        ends=("committed", "released", "rolled_back"),
    ),
    "stage_batches": Machine(
        "shares leased to a worker of a stage",
        (
            Move(ADMITTED, "a worker asks, a share is ready", "leased"),
            Move("leased", "the stage has handled them", "done"),
            Move("leased", "the lease ends otherwise", "released"),
        ),
        ends=("done", "released"),
    ),
    "steps": Machine(
        "one committed version of a policy",
        (
            Move(ADMITTED, "a batch is committed", "live"),
            Move("live", "the trainer restarts from an earlier one", "orphaned"),
        ),
        ends=("live", "orphaned"),
    ),
    "rounds": Machine(
        "one evaluation on the held-out prompts",
        (
            Move(ADMITTED, "an evaluation is due", "running"),
            Move("running", "all its groups have ended", "ended"),
            Move("running", "the run has reached its target", "cancelled"),
            Move("running", "its version is rolled back", "orphaned"),
            Move("ended", "its version is rolled back", "orphaned"),
            Move("cancelled", "its version is rolled back", "orphaned"),
        ),
        ends=("ended", "cancelled", "orphaned"),
    ),
    "nodes": Machine(
        "a rollout node",
        (
            Move(ADMITTED, "it is heard of", "healthy"),
            Move(ADMITTED, "the first sum of gone nodes", "gone"),
            Move("healthy", "it is silent for too long", "gone"),
            Move("healthy", "it leaves", "left"),
            Move("gone", "it is heard of again", "healthy"),
            Move("left", "a new process has its name", "healthy"),
            Move("gone", "it is added to the sum of gone nodes", REMOVED),
            Move("left", "it is added to the sum of gone nodes", REMOVED),
        ),
    ),
    "units": Machine(
        "a storage unit",
        (
            Move(ADMITTED, "it is heard of", "healthy"),
            Move("healthy", "it is silent for too long", "gone"),
            Move("gone", "it is heard of again", "healthy"),
        ),
    ),
    "segments": Machine(
        "a file of rows in a storage unit",
        (
            Move(ADMITTED, "a row in it is reported, or its unit finds it", "live"),
            Move("live", "nobody needs or writes it", "dropping"),
            Move("dropping", "its unit has dropped it", "dropped"),
        ),
        ends=("dropped",),
    ),
}


# ---------------------------------------------------------------- drawing

BEGIN, END = "<!-- states: begin -->", "<!-- states: end -->"
_DRAWN = ("tasks", "groups", "shares", "batches")


def drawing() -> str:
    """The part of docs/dataflow.md that is made from the table: diagrams of the main ones, and all moves."""
    parts = [_diagram(name, MACHINES[name]) for name in _DRAWN]
    return "\n\n".join([BEGIN, *parts, _table(MACHINES.items()), END])


def _diagram(name: str, machine: Machine) -> str:
    lines = [f"**{name}**: {machine.meaning}.", "", "```mermaid", "stateDiagram-v2"]
    for move in machine.moves:
        state, following = move.state or "[*]", "[*]" if move.next == REMOVED else move.next
        lines.append(f"    {state} --> {following}: {move.event}")
    return "\n".join([*lines, "```"])


def _table(machines: Iterable[tuple[str, Machine]]) -> str:
    lines = ["| table | state | event | next state | cause |", "|---|---|---|---|---|"]
    for name, machine in machines:
        for move in machine.moves:
            causes = ", ".join(move.causes)
            lines.append(f"| {name} | {move.state or '-'} | {move.event} | {move.next} | {causes} |")
    return "\n".join(lines)


def drawn(text: str) -> str:
    """The page `text` with the present drawing between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + drawing() + after


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(drawn(page.read_text()))
