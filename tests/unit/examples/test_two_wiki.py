"""The real questions and their corpus, where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow.agents.rewards.answer_text import normalised
from rillflow.agents.tools.corpus import Corpus
from rillflow.dataflow.sources.benchmarks import data_folder
from rillflow.examples.two_wiki import CORPUS, QUESTIONS, prompts

pytestmark = pytest.mark.needs("data")


def test_splits_share_no_question() -> None:
    train, heldout = list(prompts("train", 10_000, 1)), list(prompts("heldout", 10_000, 1))
    assert not {row["payload"]["question"] for row in train} & {row["payload"]["question"] for row in heldout}
    assert len({row["id"] for row in train + heldout}) == 866
    again = list(prompts("train", 10_000, 2))
    assert again != train
    assert sorted(row["id"] for row in again) == sorted(row["id"] for row in train)
    assert list(prompts("train", 5, 1)) == train[:5]


def test_a_search_finds_what_a_question_is_about(tmp_path: Path) -> None:
    corpus = Corpus.open(CORPUS, cache=tmp_path)
    titles = {normalised(json.loads(line)["title"]) for line in (data_folder() / CORPUS).read_text().splitlines()}
    lines = (data_folder() / QUESTIONS).read_text().splitlines()[:300]
    found = []
    for row in map(json.loads, lines):
        if wanted := {normalised(title) for title in row["titles"]} & titles:
            found.append(bool(wanted & {normalised(passage.title) for passage in corpus.search(row["question"], 3)}))
    assert sum(found) > 0.8 * len(found) > 0.8 * 150
