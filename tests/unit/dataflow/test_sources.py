"""Prompt sources: good ones are pure and ordered by their seed; bad ones say what is wrong and where."""

from __future__ import annotations

import json

import pytest

from rillflow.config import SourceConfig
from rillflow.dataflow.sources import InOrder, Shuffled, open_source
from rillflow.errors import ConfigError, DataError
from rillflow.types import Prompt


def file(tmp_path, *lines, **options):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return SourceConfig(path=str(path), **options)


def opened(config, shuffle=False):
    return open_source(config, seed=1, shuffle=shuffle)


def test_rows_are_payloads_and_ids_come_from_their_key_or_line(tmp_path):
    source = opened(file(tmp_path, {"id": "a", "q": 1}, b"\n", {"q": 2}))
    assert source.length == 2
    assert source.at(0) == Prompt(id="a", payload={"id": "a", "q": 1})
    assert source.at(1) == Prompt(id="3", payload={"q": 2})
    assert source.at(2) == source.at(0)


def test_another_id_key_and_a_limit(tmp_path):
    source = opened(file(tmp_path, {"name": 7}, {"name": 8}, b"not even JSON", id_key="name", limit=2))
    assert [source.at(i).id for i in range(2)] == ["7", "8"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no prompts"),
        ([b"\n\n"], "no prompts"),
        ([{"q": 1}, b'{"q": \n'], "line 2 is not valid JSON"),
        ([b"\xff\xfe{}\n"], "line 1 is not valid JSON"),
        ([{"q": 1}, [1, 2]], "line 2 is a list, not an object"),
        ([{"id": "x"}, {"id": "y"}, {"id": "x"}], "line 3 has the id 'x' of line 1"),
    ],
)
def test_bad_files_name_the_line(tmp_path, lines, message):
    with pytest.raises(DataError, match=message) as caught:
        opened(file(tmp_path, *lines))
    assert caught.value.hint


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        opened(SourceConfig(path=str(tmp_path / "nothing.jsonl")))


GENERATORS = """
def good(count): return ({"id": i, "payload": {"n": i}} for i in range(count))
def empty(): return iter(())
def shapeless(): yield {"id": "a"}
def same(): yield {"id": "a", "payload": {}}; yield {"id": "a", "payload": {}}
def broken(): raise ValueError("no luck")
def odd(): yield {"id": "a", "payload": {"x": object()}}
"""


@pytest.fixture
def generator(tmp_path):
    path = tmp_path / "generators.py"
    path.write_text(GENERATORS)
    return lambda name, **arguments: SourceConfig(generator=f"{path}:{name}", arguments=arguments)


def test_a_generator(generator):
    source = opened(generator("good", count=3))
    assert [source.at(i) for i in range(3)] == [Prompt(id=str(i), payload={"n": i}) for i in range(3)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "no prompts"),
        ("shapeless", "item 1 is"),
        ("same", "item 2 has the id 'a' of item 1"),
        ("broken", "raised ValueError: no luck"),
        ("odd", "item 1 cannot be sent"),
    ],
)
def test_bad_generators(generator, name, message):
    with pytest.raises(DataError, match=message):
        opened(generator(name))


def test_wrong_arguments_and_unknown_generators(generator):
    with pytest.raises(DataError, match="unexpected keyword"):
        opened(generator("good", amount=3))
    with pytest.raises(ConfigError, match="has no 'goood'"):
        opened(generator("goood"))


def test_shuffled_epochs_are_permutations_fixed_by_the_seed():
    rows = [Prompt(id=str(i), payload={}) for i in range(20)]

    def epoch(source, number):
        return [source.at(number * 20 + i).id for i in range(20)]

    source, same, other = Shuffled(rows, 1), Shuffled(rows, 1), Shuffled(rows, 2)
    for number in range(3):
        assert sorted(epoch(source, number), key=int) == [row.id for row in rows]
    assert epoch(source, 7) == epoch(same, 7)
    assert epoch(source, 0) != epoch(source, 1)
    assert epoch(source, 0) != epoch(other, 0)
    assert epoch(InOrder(rows), 5) == [row.id for row in rows]


ORDER = ["4", "5", "7", "0", "1", "3", "2", "6"]


def test_the_order_never_changes_between_releases():
    rows = [Prompt(id=str(i), payload={}) for i in range(8)]
    assert [Shuffled(rows, 0).at(i).id for i in range(8)] == ORDER
