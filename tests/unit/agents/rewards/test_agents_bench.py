"""`bench.agents_gpu` makes only valid recipes; the lessons of its search agent look like its episodes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import agents_gpu
from rillflow.agents.tools.corpus import data_file
from rillflow.agents.workflows.search_agent import read
from rillflow.agents.workflows.search_lessons import demonstrations
from rillflow.config import load_recipe, recipes
from rillflow.errors import RillflowError


def arguments(case: str, engine: str, data: Path) -> argparse.Namespace:
    return argparse.Namespace(
        case=case, engine=engine, python="python3", steps=4, lr=1e-6, seed=3, nodes=2, data=str(data)
    )


@pytest.mark.parametrize("engine", ["vllm", "embedded"])
@pytest.mark.parametrize("case", agents_gpu.CASES)
@pytest.mark.parametrize("gym", [True, False])
def test_its_recipes_are_valid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, case: str, engine: str, gym: bool
) -> None:
    name = agents_gpu.CASES[case]
    if name not in recipes():
        pytest.skip(f"there is no recipe {name}")
    monkeypatch.setattr(agents_gpu.importlib.util, "find_spec", lambda name: gym or None)
    recipe = load_recipe(name, agents_gpu.overrides(arguments(case, engine, tmp_path), "tiny"))
    policy = recipe.policies["agent"]
    assert (policy.model, policy.engine.kind, policy.trainer.steps, recipe.seed) == ("tiny", engine, 4, 3)
    prepared = case == "reasoning" and not gym
    assert (recipe.data.prompts[0].path is not None) == prepared


def test_lessons_of_the_search_agent_hold_their_answers() -> None:
    try:
        data_file("qa/2wiki_corpus.jsonl")
    except RillflowError:
        pytest.skip("2Wiki is not in the folder of data sets (RILLFLOW_DATA)")
    pytest.importorskip("bm25s", reason="bm25s is not installed")
    lessons = [row["payload"]["messages"] for row in demonstrations("train", 20, 1, passages=3, characters=400)]
    assert lessons
    for _, search, found, said in lessons:
        asked, answered = read(search["content"]), read(said["content"])
        assert asked is not None
        assert answered is not None
        assert (asked.kind, answered.kind) == ("search", "answer")
        assert answered.text.lower() in found["content"].lower()
