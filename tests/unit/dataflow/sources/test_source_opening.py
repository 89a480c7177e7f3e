"""Opening a recipe's sources: names, ids, seeds; and `check`, which refuses before anything starts."""

from __future__ import annotations

import pytest
from source_support import ids, jsonl, opened

from rillflow.cli.run import check
from rillflow.config import Recipe, SourceConfig
from rillflow.dataflow.sources import open_sources, source_names
from rillflow.errors import ConfigError, DataError


def rows(folder, stem, count=4, **options):
    return jsonl(folder, *({"q": number} for number in range(count)), file=f"{stem}.jsonl", **options)


def test_one_source_is_as_it_stands(tmp_path):
    config = rows(tmp_path, "only", name="mine")
    source = open_sources([config], seed=3, shuffle=True)
    assert ids(source) == ids(opened(config, seed=3, shuffle=True))
    assert source.at(0).source == ""


def test_several_carry_their_names(tmp_path):
    configs = [rows(tmp_path, "a", weight=3), rows(tmp_path, "b", name="hard")]
    source = open_sources(configs, seed=3, shuffle=False)
    assert ids(source, range(4)) == ["a/1", "a/2", "hard/1", "a/3"]
    assert [source.at(place).source for place in range(4)] == ["a", "a", "hard", "a"]
    assert source.at(2).payload == {"q": 0}
    assert source.length == 15


def test_orders_follow_from_the_seed_and_differ_between_sources(tmp_path):
    configs = [rows(tmp_path, "a", 30), rows(tmp_path, "b", 30)]
    source, same = (open_sources(configs, seed=3, shuffle=True) for _ in range(2))
    found = ids(source, range(200))
    assert found == ids(same, range(200))
    assert [text[2:] for text in found[:60:2]] != [text[2:] for text in found[1:60:2]]
    assert found != ids(open_sources(configs, seed=4, shuffle=True), range(200))


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ([{"path": "/x/train.jsonl"}, {"path": "/y/train.parquet"}], ["train", "train-2"]),
        ([{"path": "a.jsonl"}, {"path": "b.jsonl", "name": "a"}], ["a-2", "a"]),
        ([{"dataset": "openai/gsm8k"}, {"reasoning_gym": "leg_counting"}], ["gsm8k", "leg_counting"]),
        ([{"generator": "a.b:make"}, {"generator": "/x/file.py:make"}], ["make", "make-2"]),
        ([{"path": "/x/two words.jsonl"}, {"path": "/x/___.jsonl"}], ["two-words", "source"]),
    ],
)
def test_default_names(configs, expected):
    assert source_names([SourceConfig(**config) for config in configs]) == expected


def test_a_name_twice(tmp_path):
    configs = [rows(tmp_path, "a", name="x"), rows(tmp_path, "b", name="x")]
    with pytest.raises(ConfigError, match="two sources of prompts are called 'x'"):
        open_sources(configs, seed=0, shuffle=True)


def test_a_bad_source_among_good_ones(tmp_path):
    with pytest.raises(DataError, match=r"b\.jsonl: line 1 is not valid JSON"):
        open_sources([rows(tmp_path, "a"), jsonl(tmp_path, b"{", file="b.jsonl")], seed=0, shuffle=True)


def recipe(folder, **changes):
    (folder / "play.py").write_text("async def play(episode):\n    return 1.0\n")
    given = {
        "name": "mine",
        "policies": {"agent": {"model": "tiny"}},
        "workflow": f"{folder}/play.py:play",
        "data": {"prompts": [rows(folder, "a").model_dump(), rows(folder, "b").model_dump()]},
    }
    return Recipe.model_validate(given | changes)


def test_check_opens_every_source_and_hook(tmp_path):
    check(recipe(tmp_path))
    good, bad = rows(tmp_path, "a").model_dump(), jsonl(tmp_path, b"{", file="bad.jsonl").model_dump()
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        check(recipe(tmp_path, data={"prompts": [good, bad]}))
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        check(recipe(tmp_path, data={"prompts": good, "heldout": bad}))
    with pytest.raises(ConfigError, match="zero_varience"):
        check(recipe(tmp_path, dataflow={"filters": ["zero_varience"]}))
