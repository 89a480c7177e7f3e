"""Hugging Face datasets, real ones on the disk: one split, positions, and refusals that say what to set."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pytest
from source_support import ids, jsonl, opened

from rillflow.config import SourceConfig
from rillflow.errors import ConfigError, DataError
from rillflow.types import Prompt


def saved(folder, dataset, limit=None, id_key="id", **arguments):
    dataset.save_to_disk(folder / "saved")
    return SourceConfig(dataset=str(folder / "saved"), arguments=arguments, limit=limit, id_key=id_key)


def table(count=3000):
    from datasets import Dataset

    return Dataset.from_dict({"uid": [f"u{number}" for number in range(count)], "q": list(range(count))})


def test_a_dataset_that_was_saved(tmp_path):
    from datasets import Dataset

    when = datetime(2024, 5, 6, tzinfo=UTC)
    rows = Dataset.from_dict({"id": ["a", None], "l": [[1, 2], []], "t": [when, None]})
    source = opened(saved(tmp_path, rows))
    assert source.at(0) == Prompt(id="a", payload={"id": "a", "l": [1, 2], "t": "2024-05-06T00:00:00+00:00"})
    assert source.at(1) == Prompt(id="2", payload={"id": None, "l": [], "t": None})


def test_the_same_prompts_in_any_order_and_after_a_resume(tmp_path):
    config = saved(tmp_path, table(), id_key="uid")
    source, again = (opened(config, shuffle=True) for _ in range(2))
    assert sorted(ids(source)) == sorted(f"u{number}" for number in range(3000))
    assert [again.at(place) for place in range(7000, 7020)] == [source.at(place) for place in range(7000, 7020)]


def test_a_limit_and_a_format(tmp_path):
    assert ids(opened(saved(tmp_path, table().with_format("numpy"), limit=2, id_key="uid"))) == ["u0", "u1"]
    assert opened(SourceConfig(dataset=str(tmp_path / "saved"), limit=10**9)).length == 3000


def test_one_of_several_splits(tmp_path):
    from datasets import DatasetDict

    splits = DatasetDict({"train": table(5), "test": table(2)})
    assert opened(saved(tmp_path, splits, split="test")).length == 2
    for split in ({}, {"split": "validation"}):
        with pytest.raises(ConfigError, match="one must be named: train, test") as caught:
            opened(SourceConfig(dataset=str(tmp_path / "saved"), arguments=split))
        assert "arguments.split" in caught.value.hint


def test_a_split_where_there_is_none(tmp_path):
    with pytest.raises(ConfigError, match="was saved without splits"):
        opened(saved(tmp_path, table(5), split="train"))


def loaded(folder, **arguments):
    path = jsonl(folder, {"q": 1}, {"q": 2}).path
    arguments = {"data_files": path, "cache_dir": str(folder / "cache")} | arguments
    return SourceConfig(dataset="json", arguments=arguments)


def test_what_load_dataset_loads(tmp_path):
    assert [opened(loaded(tmp_path, split="train")).at(place).payload for place in range(2)] == [{"q": 1}, {"q": 2}]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ConfigError, "one must be named: train"),
        ({"split": "train", "streaming": True}, ConfigError, "is a stream"),
        ({"split": "train[:0]"}, DataError, "corresponds to no data"),
        ({"split": "test"}, DataError, "cannot be read"),
        ({"split": "train", "bogus": 1}, DataError, "cannot be read"),
        ({"split": "train", "data_files": "/nowhere.jsonl"}, DataError, "cannot be read"),
    ],
)
def test_bad_arguments(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        opened(loaded(tmp_path, **arguments))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": ["a", "b", "b"]}, "row 3 has the id 'b' of row 2"),
        ({"q": ["x", "y"], "picture": [None, b"raw"]}, "row 2 cannot be sent to a node: picture is of type bytes"),
    ],
)
def test_bad_rows_are_named(tmp_path, columns, message):
    from datasets import Dataset

    with pytest.raises(DataError, match=message):
        opened(saved(tmp_path, Dataset.from_dict(columns)))


def test_a_dataset_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        opened(SourceConfig(dataset=str(tmp_path / "nothing"), arguments={"split": "train"}))


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError) as caught:
        opened(SourceConfig(dataset="openai/gsm8k"))
    assert caught.value.hint == "pip install rillflow[datasets]"
