"""What docs/prompts.md shows works: every recipe snippet is opened, every function called."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from needs import require
from rillflow.config import load_recipe
from rillflow.dataflow.sources import open_heldout, open_sources

PAGE = Path(__file__).parents[4] / "docs" / "prompts.md"
RECIPE = {"name": "mine", "policies": {"agent": {"model": "tiny"}}, "workflow": "play.py:play"}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with all files that the page names."""
    from datasets import Dataset, DatasetDict

    rows = [{"id": f"i{number}", "name": f"n{number}", "uid": f"u{number}"} for number in range(5)]
    for name in ("questions.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "questions.parquet")
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(tmp_path / "saved")
    (tmp_path / "sums.py").write_text(next(block for block in blocks("python") if "def sums" in block))
    monkeypatch.chdir(tmp_path)
    return tmp_path


SLOW = "reasoning_gym"  # the package takes seconds to import


@pytest.mark.parametrize(
    "snippet", [pytest.param(one, marks=[pytest.mark.slow] if SLOW in one else []) for one in blocks("yaml")]
)
def test_a_snippet(folder, snippet):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(RECIPE) + snippet)
    data = load_recipe(str(path)).data
    if "reasoning_gym" in snippet:
        require("reasoning-gym")
    if "openai/" in snippet:  # on the hub: the recipe is right, and the hub is not here
        return
    source = open_sources(data.prompts, seed=1, shuffle=data.shuffle)
    assert len({source.at(place).id for place in range(source.length)}) > 1
    heldout = open_heldout(data.heldout, seed=1)
    assert heldout is None or heldout.length > 1


def test_the_page_shows_every_kind():
    text = "".join(blocks("yaml"))
    assert all(f"{kind}:" in text for kind in ("path", "dataset", "reasoning_gym", "generator", "weight", "epochs"))


@pytest.mark.slow
@pytest.mark.needs("reasoning-gym")
def test_the_reward_scores_an_entry(folder):
    scope: dict[str, object] = {}
    exec(next(block for block in blocks("python") if "def reward" in block), scope)
    config = next(
        source
        for block in blocks("yaml")
        for source in yaml.safe_load(block)["data"].values()
        if isinstance(source, dict) and "reasoning_gym" in source
    )
    (folder / "mine.yaml").write_text(yaml.safe_dump(RECIPE | {"data": {"prompts": config}}))
    prompt = open_sources(load_recipe(str(folder / "mine.yaml")).data.prompts, seed=1, shuffle=False).at(0)
    assert scope["reward"](prompt.payload, prompt.payload["answer"]) == 1.0
