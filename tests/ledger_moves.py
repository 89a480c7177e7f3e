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


def watch(ledger: Ledger) -> None:
    """Note the moves that the ledger makes from now on. Those that are rolled back are not noted."""
    run = ledger.db._connection.execute
    run("CREATE TEMP TABLE moves (name, state, next, PRIMARY KEY (name, state, next))")
    for name in MACHINES:
        for event, (when, states) in _EVENTS.items():
            run(
                f"CREATE TEMP TRIGGER watch_{name}_{event.split()[0]} AFTER {event} ON main.{name} {when} "
                f"BEGIN INSERT OR IGNORE INTO moves VALUES ('{name}', {states}); END"
            )


def moves(ledger: Ledger) -> set[Seen]:
    return {tuple(row) for row in ledger.db.all("SELECT name, state, next FROM temp.moves")}


def check_moves(ledger: Ledger) -> None:
    unknown = moves(ledger) - KNOWN
    assert not unknown, f"moves that the table of states does not have: {sorted(unknown)}"
