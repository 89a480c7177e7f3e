"""How `rillflow eval` reads its arguments: suites of held-out prompts, engines, and overrides of policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rillflow.cli.evaluating import Asked, plan
from rillflow.cli.export import open_checkpoint
from rillflow.config import Recipe, load_recipe
from rillflow.errors import ConfigError
from rillflow.evaluate.run import HELDOUT, Evaluation, open_suites


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from arithmetic import write_rows

    write_rows(tmp_path / "data", 3)
    monkeypatch.setenv("RILLFLOW_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def planned(*overrides: str, **asked: Any) -> Evaluation:
    given: dict[str, Any] = {
        "checkpoint": "tiny", "overrides": overrides, "names": ("gsm8k",), "limit": 2, "samples": 1, "temperature": 0.6,
        "max_tokens": None, "seed": 0, "version": "latest", "workflow": None, "recipe": None, "engine": "embedded",
        "exact": False, "out": None,
    }  # fmt: skip
    return plan(Asked(**given | asked), open_checkpoint("tiny", "latest"))


def recipe_of(*overrides: str, **asked: Any) -> Recipe:
    return planned(*overrides, **asked).recipe


HOLDS_OUT = ["data.heldout=[{benchmark: gsm8k, limit: 2}, {path: own.jsonl}]"]


def test_held_out_benchmarks_vote_as_benchmarks_and_answers_are_as_long_as_asked(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"question": "How many?"}\n')
    recipe = load_recipe("two_policies", HOLDS_OUT)
    as_run = open_suites(recipe, [HELDOUT], limit=None, max_tokens=None)
    assert [(suite.name, suite.kind) for suite in as_run] == [("gsm8k", "math"), ("own", "text")]
    assert all(suite.recipe == recipe for suite in as_run)
    for suite in open_suites(recipe, [HELDOUT], limit=None, max_tokens=9):
        assert [policy.sampling.max_tokens for policy in suite.recipe.policies.values()] == [9, 9]


def test_the_servers_of_several_policies_share_the_gpu() -> None:
    def memories(recipe: str | None, *overrides: str) -> list[float]:
        policies = recipe_of(*overrides, recipe=recipe, engine="vllm").policies.values()
        return [policy.engine.server.memory for policy in policies]

    assert memories(None) == [0.85]
    assert memories("two_policies") == [0.425, 0.425]
    assert memories("two_policies", "engine.server.memory=0.2") == [0.2, 0.2]


def test_a_change_goes_to_the_policies_or_to_the_recipe_whoever_has_the_key() -> None:
    recipe = recipe_of("reasoning=none", "tools=llama3", "sampling.top_p=0.5", recipe="two_policies")
    for policy in recipe.policies.values():
        assert (policy.reasoning, policy.tools, policy.sampling.top_p) == ("none", "llama3", 0.5)
    assert recipe.tools == []
    listed = ("tools=[{name: calculator}]", "tools.0.timeout=5")
    assert [(tool.name, tool.timeout) for tool in recipe_of(*listed).tools] == [("calculator", 5.0)]
    with pytest.raises(ConfigError, match="tools"):
        recipe_of("tools=morse")


def test_records_of_another_dialect_are_not_these() -> None:
    assert planned().settings == planned().settings
    assert planned().settings != planned("reasoning=none").settings
