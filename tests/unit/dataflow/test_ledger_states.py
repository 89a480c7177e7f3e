"""The table of states: the docs are made from it, the schema has its tables, and the ledger moves as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.dataflow.ledger.states import ADMITTED, MACHINES, REMOVED, Machine, drawn

PAGE = Path(__file__).parents[3] / "docs" / "dataflow.md"


def test_the_page_of_the_dataflow_layer_has_the_present_table() -> None:
    text = PAGE.read_text()
    assert drawn(text) == text, "run `python -m rillflow.dataflow.ledger.states docs/dataflow.md`"


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_state_is_entered_and_ends_are_states(machine: Machine) -> None:
    entered = {move.next for move in machine.moves}
    assert set(machine.states) <= entered
    assert {*machine.ends, *machine.caused} <= set(machine.states)
    assert any(move.state == ADMITTED for move in machine.moves)
    assert not any(move.state == REMOVED for move in machine.moves)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_no_move_is_named_twice(machine: Machine) -> None:
    named = [(move.state, move.event, move.next) for move in machine.moves]
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("name", MACHINES)
def test_a_row_in_an_unknown_state_breaks_the_audit(make_world, name: str) -> None:
    """The audit has an identity for each table of states."""
    world = make_world()
    names = {identity.name for identity in world.audit().identities}
    assert f"{name}: in no known state" in names


def test_a_move_that_the_table_does_not_have_is_noticed(make_world) -> None:
    world = make_world()
    world.ledger.db.run("UPDATE groups SET state = 'trained' WHERE id = 't000000'")
    with pytest.raises(AssertionError, match="playing"):
        world.check()
    world.ledger.db.run("UPDATE groups SET state = 'playing' WHERE id = 't000000'")
    world.ledger.db.run("DELETE FROM temp.moves")


def test_a_move_that_is_made_again_is_noted_once(make_world) -> None:
    """Also by an upsert, as when a unit is lost and heard of a second time."""
    db = make_world().ledger.db
    healthy = (
        "INSERT INTO units VALUES ('other', '', 0, 0, 'healthy') ON CONFLICT (unit) DO UPDATE SET state = 'healthy'"
    )
    db.run("DELETE FROM temp.moves")
    for _ in range(2):
        db.run(healthy)
        db.run("UPDATE units SET state = 'gone' WHERE unit = 'other'")
    db.run(healthy)
    found = [tuple(row) for row in db.all("SELECT state, next FROM temp.moves WHERE name = 'units'")]
    assert sorted(found) == sorted([(ADMITTED, "healthy"), ("healthy", "gone"), ("gone", "healthy")])
