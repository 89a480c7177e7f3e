"""Benchmarks as sources: payloads that workflows and rewards can use, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow.agents.rewards.registry import REWARDS
from rillflow.config import SourceConfig, load_recipe
from rillflow.dataflow.sources import open_heldout, open_source
from rillflow.dataflow.sources.benchmarks import BENCHMARKS, benchmark, filled
from rillflow.errors import ConfigError, DataError
from rillflow.evaluate import scores
from rillflow.examples import two_wiki

LENGTHS = {
    "gsm8k": 1319,
    "gsm8k_train": 7473,
    "math500": 500,
    "aime24": 30,
    "humaneval": 164,
    "mbpp": 974,
    "hotpot": 100,
    "2wiki": 174,
}


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of our own in the shape of GSM8K's."""
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}\n#### 1,{2 * n:03d}"} for n in range(1, 4)]
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("RILLFLOW_DATA", str(tmp_path))
    return tmp_path


def test_a_payload_has_our_prompt_the_bare_question_and_what_is_right(own_data: Path) -> None:
    source = open_source(SourceConfig(benchmark="gsm8k", limit=2), seed=0, shuffle=False)
    assert source.length == 2
    payload = source.at(1).payload
    assert (payload["problem"], payload["answer"], payload["benchmark"]) == ("What is 2 plus 2?", "1004", "gsm8k")
    assert payload["question"].startswith("What is 2 plus 2?")
    assert "\\boxed{}" in payload["question"]


def test_a_recipe_may_have_its_own_words(own_data: Path) -> None:
    config = SourceConfig(benchmark="gsm8k", arguments={"template": "Q: {problem} {}"})
    assert open_source(config, seed=0, shuffle=False).at(0).payload["question"] == "Q: What is 1 plus 1? {}"
    for arguments in ({"template": "no place"}, {"templates": "{problem}"}, {"template": 3}):
        with pytest.raises(ConfigError, match="as its only argument"):
            open_source(SourceConfig(benchmark="gsm8k", arguments=arguments), seed=0, shuffle=False)


def test_2wiki_asks_what_its_search_agents_do_not_train_on(own_data: Path) -> None:
    (own_data / "qa").mkdir()
    rows = [{"question": f"Who is {n}?", "answer": str(n), "titles": [str(n)]} for n in range(23)]
    (own_data / two_wiki.QUESTIONS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(SourceConfig(benchmark="2wiki"), seed=0, shuffle=False)
    asked = {source.at(index).payload["problem"] for index in range(source.length)}
    train, heldout = (
        {row["payload"]["question"] for row in two_wiki.prompts(split, 100, 1)} for split in ("train", "heldout")
    )
    assert asked == heldout
    assert not asked & train


def test_braces_in_a_question_stay_as_they_are() -> None:
    assert filled("{problem} \\boxed{}", {"problem": "{x} in {problem}"}) == "{x} in {problem} \\boxed{}"


def test_several_held_out_sources_follow_one_another_and_name_themselves(own_data: Path) -> None:
    changes = ["data.heldout=[{benchmark: gsm8k, limit: 2}, {benchmark: gsm8k, name: again, limit: 1}]"]
    recipe = load_recipe("quickstart", changes)
    source = open_heldout(recipe.data.heldout, seed=0)
    assert source is not None
    found = [source.at(index) for index in range(source.length)]
    assert [(one.id, one.source) for one in found] == [("gsm8k/1", "gsm8k"), ("gsm8k/2", "gsm8k"), ("again/1", "again")]


def test_one_held_out_source_needs_no_list_and_none_is_none() -> None:
    assert len(load_recipe("quickstart").data.heldout) == 1
    assert load_recipe("stockroom", ["data.heldout=null"]).data.heldout == []


def test_unknown_names_and_missing_files_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as unknown:
        benchmark("gsm8")
    assert "did you mean 'gsm8k'" in unknown.value.hint
    monkeypatch.setenv("RILLFLOW_DATA", str(tmp_path))
    with pytest.raises(DataError, match="the benchmark aime24 is not at hand") as missing:
        open_source(SourceConfig(benchmark="aime24"), seed=0, shuffle=False)
    assert "set RILLFLOW_DATA" in missing.value.hint


@pytest.mark.needs("data")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_row_of_every_benchmark_is_a_prompt_that_its_reward_can_grade(name: str) -> None:
    found, source = BENCHMARKS[name], open_source(SourceConfig(benchmark=name), seed=0, shuffle=False)
    assert source.length == LENGTHS.get(name, source.length)
    assert found.reward in REWARDS
    for index in (0, source.length // 2, source.length - 1):
        payload = source.at(index).payload
        assert payload["problem"].strip()
        assert payload["problem"].strip() in payload["question"]
        assert found.kind == "code" or payload["answer"]
        assert "{problem}" not in payload["question"]


@pytest.mark.needs("data")
async def test_right_answers_are_right_and_wrong_ones_wrong() -> None:
    for name, wrong in {"gsm8k": "It is \\boxed{-77}.", "triviaqa": "<answer>nobody at all</answer>"}.items():
        payload = open_source(SourceConfig(benchmark=name, limit=1), seed=0, shuffle=False).at(0).payload
        gold = payload["answer"] if name == "gsm8k" else payload["answer"][0]
        right = f"It is \\boxed{{{gold}}}." if name == "gsm8k" else f"<answer>{gold}</answer>"
        assert await scores.reward(payload, right) == 1.0
        assert await scores.reward(payload, wrong) == 0.0
