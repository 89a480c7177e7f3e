"""Generators: the user's function is trusted with nothing but its prompts."""

from __future__ import annotations

import pytest
from source_support import ids, opened

from rillflow.config import SourceConfig
from rillflow.dataflow.sources import readers as module
from rillflow.errors import ConfigError, DataError
from rillflow.types import Prompt

GENERATORS = """
import itertools, datetime, decimal, numpy
def good(count): return ({"id": i, "payload": {"n": i}} for i in range(count))
def endless(): return ({"id": i, "payload": {}} for i in itertools.count())
def rich(): yield {"id": 1, "payload": {"a": numpy.arange(3), "t": (1, numpy.float32(0.5)), "nan": float("nan")}}
def empty(): return iter(())
def shapeless(): yield {"id": "a"}
def same(): yield {"id": "a", "payload": {}}; yield {"id": "a", "payload": {}}
def broken(): raise ValueError("no luck")
def disk(): raise OSError("no such thing")
def odd(): yield {"id": "a", "payload": {"x": object()}}
def price(): yield {"id": "a", "payload": {}}; yield {"id": "b", "payload": {"x": [{"y": decimal.Decimal(1)}]}}
def surrogate(): yield {"id": "a", "payload": {"x": "\\ud800"}}
"""


@pytest.fixture
def generator(tmp_path):
    path = tmp_path / "generators.py"
    path.write_text(GENERATORS)
    return lambda name, limit=None, **arguments: SourceConfig(
        generator=f"{path}:{name}", arguments=arguments, limit=limit
    )


def test_a_generator(generator):
    source = opened(generator("good", count=3))
    assert [source.at(i) for i in range(3)] == [Prompt(id=str(i), payload={"n": i}) for i in range(3)]


def test_payloads_become_plain(generator):
    payload = opened(generator("rich")).at(0).payload
    assert payload.pop("nan") != 0
    assert payload == {"a": [0, 1, 2], "t": [1, 0.5]}


def test_an_endless_generator_is_cut_or_refused(generator, monkeypatch):
    assert ids(opened(generator("endless", limit=3))) == ["0", "1", "2"]
    monkeypatch.setattr(module, "_MOST", 50)
    with pytest.raises(DataError, match="yields more than 50 prompts"):
        opened(generator("endless"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "no prompts"),
        ("shapeless", "item 1 is"),
        ("same", "item 2 has the id 'a' of item 1"),
        ("broken", "raised ValueError: no luck"),
        ("disk", "raised OSError: no such thing"),
        ("odd", "item 1 cannot be sent to a node: x is of type object"),
        ("price", r"item 2 cannot be sent to a node: x\[0\]\.y is of type Decimal"),
        ("surrogate", "item 1 cannot be sent to a node"),
    ],
)
def test_bad_generators(generator, name, message):
    with pytest.raises(DataError, match=message) as caught:
        opened(generator(name))
    assert caught.value.hint


def test_wrong_arguments_and_unknown_generators(generator):
    with pytest.raises(DataError, match="unexpected keyword"):
        opened(generator("good", amount=3))
    with pytest.raises(ConfigError, match="has no 'goood'"):
        opened(generator("goood"))
