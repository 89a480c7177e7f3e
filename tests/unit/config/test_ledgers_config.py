"""Recipes with several ledgers: the valid ones, and the settings that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.config import Recipe
from rillflow.config.load import validate
from rillflow.errors import ConfigError
from rillflow.resources.placement import ledgers, services


def recipe(**changes: Any) -> Recipe:
    policy = {"model": "tiny", "trainer": {"batch_groups": 4}, **changes.pop("policy", {})}
    return validate(
        {
            "name": "several",
            "policies": {"main": policy, **changes.pop("policies", {})},
            "workflow": "rillflow.examples.stockroom:play",
            "data": {"prompts": {"path": "prompts.jsonl"}},
            **changes,
            "dataflow": {"ledgers": 2, **changes.get("dataflow", {})},
        }
    )


def test_every_ledger_has_a_process_and_units_of_its_own() -> None:
    found = recipe(dataflow={"units": {"count": 2}})
    assert [(one.name, one.options) for one in ledgers(found)] == [
        ("dataflow", ()),
        ("dataflow-1", ("--ledger", "1")),
    ]
    assert [(one.name, one.options) for one in services(found)] == [
        ("unit-0", ("--name", "unit-0")),
        ("unit-1", ("--name", "unit-1")),
        ("unit-1-0", ("--name", "unit-1-0", "--ledger", "1")),
        ("unit-1-1", ("--name", "unit-1-1", "--ledger", "1")),
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dataflow": {"curators": ["greso"]}}, "dataflow.curators"),
        ({"dataflow": {"sampler": "fifo"}}, "dataflow.sampler=fifo"),
        ({"policies": {"other": {"model": "tiny"}}}, "several policies"),
        ({"policy": {"stages": {"reference": {}}}}, "policies.main.stages"),
        ({"policy": {"trainer": {"batch_groups": 4, "stream_groups": 2}}}, "trainer.stream_groups"),
        ({"runtime": {"deterministic": True}, "dataflow": {"staleness": 0}}, "runtime.deterministic"),
        ({"resources": {"scaling": {"enabled": True}}}, "resources.scaling"),
        ({"policy": {"trainer": {"batch_groups": 3}}}, "trainer.batch_groups that it divides"),
    ],
)
def test_what_one_of_several_ledgers_cannot_decide_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        recipe(**changes)


def test_each_ledger_gets_its_part_of_the_window() -> None:
    from rillflow.dataflow.rules import Rules

    rules = Rules.of(recipe(dataflow={"staleness": 2}), ledger=1)
    assert (rules.ledger, rules.ledgers, rules.policies["main"].window) == (1, 2, 6)
