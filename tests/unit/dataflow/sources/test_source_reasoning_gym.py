"""reasoning-gym: entries that its scorers take, the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from source_support import jsonl, opened

from rillflow.config import SourceConfig
from rillflow.dataflow.sources import readers as module
from rillflow.errors import ConfigError, DataError

# The package takes seconds to import.
pytestmark = [pytest.mark.needs("reasoning-gym"), pytest.mark.slow]


def gym(name, limit=None, **arguments):
    return SourceConfig(reasoning_gym=name, arguments={"seed": 5, "size": 6} | arguments, limit=limit)


def test_an_entry_and_its_name_are_the_payload():
    from reasoning_gym import create_dataset, get_score_answer_fn

    source = opened(gym("leg_counting", limit=4))
    assert source.length == 4
    prompt, entry = source.at(2), create_dataset("leg_counting", seed=5, size=6)[2]
    assert (prompt.id, prompt.payload["question"], prompt.payload["answer"]) == (
        "3",
        entry["question"],
        entry["answer"],
    )
    score = get_score_answer_fn(prompt.payload["source_dataset"])
    assert score(prompt.payload["answer"], prompt.payload) == 1.0
    assert score("no", prompt.payload) < 1.0


def test_entries_that_need_converting():
    payload = opened(gym("graph_color")).at(0).payload
    assert all(isinstance(key, str) for key in payload["metadata"]["possible_answer"])
    assert opened(gym("knights_knaves")).at(1).payload["metadata"]["names"]


OPEN = """
import json, sys
from rillflow.config import SourceConfig
from rillflow.dataflow.sources import open_sources
configs = [
    SourceConfig(reasoning_gym="isomorphic_strings", arguments={"seed": 5, "size": 6}, weight=2),
    SourceConfig(path=sys.argv[1]),
]
source = open_sources(configs, seed=3, shuffle=True)
print(json.dumps([(p.id, p.source, p.payload) for p in (source.at(i) for i in range(100_000, 100_040))]))
"""


def test_the_same_prompts_in_every_process(tmp_path):
    """This dataset draws from sets, whose order depends on the hash seed of a process."""
    path = jsonl(tmp_path, *({"q": number} for number in range(50))).path

    def elsewhere(hash_seed):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", OPEN, path], env=environment, stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout)

    first = elsewhere("1")
    assert {source for _, source, _ in first} == {"isomorphic_strings", "prompts"}
    assert first == elsewhere("2")


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (gym("leg_countin"), DataError, "did you mean 'leg_counting'"),
        (gym("leg_counting", bogus=1), DataError, "unexpected keyword argument 'bogus'"),
        (gym("leg_counting", seed=None), ConfigError, "has no seed"),
    ],
)
def test_bad_datasets(config, error, message):
    with pytest.raises(error, match=message) as caught:
        opened(config)
    assert caught.value.hint


def test_a_dataset_that_makes_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.01)
    with pytest.raises(DataError, match=r"made no entry in 0\.01 seconds"):
        opened(gym("leg_counting"))


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError) as caught:
        opened(gym("leg_counting"))
    assert caught.value.hint == "pip install rillflow[reasoning-gym]"
