"""Watches every move of a ledger's rows and holds it to the table of states."""

from __future__ import annotations

from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.ledger.states import ADMITTED, MACHINES, REMOVED

Seen = tuple[str, str, str]  # table, state, next state
KNOWN: set[Seen] = {(name, move.state, move.next) for name, machine in MACHINES.items() for move in machine.moves}
_EVENTS = {
    "UPDATE OF state": ("WHEN NEW.state != OLD.state", "OLD.state, NEW.state"),
    "INSERT": ("", f"'{ADMITTED}', NEW.state"),
    "DELETE": ("", f"OLD.state, '{REMOVED}'"),
}


# An attempt is in the row of its task while it holds it or has done it, and else in a row of its own.
_OF_ATTEMPTS = {
    "leased": ("UPDATE ON main.tasks WHEN NEW.state = 'leased' AND NEW.leases != OLD.leases", f"'{ADMITTED}', 'held'"),
    "done": ("UPDATE OF state ON main.tasks WHEN NEW.state = 'done'", "'held', 'done'"),
    "ended": (
        "INSERT ON main.ended_attempts",
        "(SELECT CASE state WHEN 'leased' THEN 'held' ELSE state END FROM main.tasks "
        "WHERE grp = NEW.grp AND place = NEW.place AND attempt = NEW.id), NEW.state",
    ),
}
# Not OR IGNORE: in a trigger SQLite uses the conflict clause of the statement that fired it, and an upsert has its own.
_NOTE = "INSERT INTO moves SELECT '{name}', {states} EXCEPT SELECT name, state, next FROM moves"


def watch(ledger: Ledger) -> None:
    """Note the moves that the ledger makes from now on. Those that are rolled back are not noted."""
    run = ledger.db._connection.execute
    run("CREATE TEMP TABLE moves (name, state, next)")
    for event, (when, states) in _OF_ATTEMPTS.items():
        run(
            f"CREATE TEMP TRIGGER watch_attempts_{event} AFTER {when} "
            f"BEGIN {_NOTE.format(name='attempts', states=states)}; END"
        )
    for name in MACHINES:
        if name == "attempts":
            continue
        for event, (when, states) in _EVENTS.items():
            run(
                f"CREATE TEMP TRIGGER watch_{name}_{event.split()[0]} AFTER {event} ON main.{name} {when} "
                f"BEGIN {_NOTE.format(name=name, states=states)}; END"
            )


def moves(ledger: Ledger) -> set[Seen]:
    return {tuple(row) for row in ledger.db.all("SELECT name, state, next FROM temp.moves")}


def check_moves(ledger: Ledger) -> None:
    unknown = moves(ledger) - KNOWN
    assert not unknown, f"moves that the table of states does not have: {sorted(unknown)}"
