"""Questions of 2WikiMultiHopQA whose answers stand in the corpus beside them, read from the folder of data sets.

Every fifth question is held out, whatever the seed; the seed gives the order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from rillflow.agents.tools.corpus import data_file

QUESTIONS = "qa/2wiki_questions_in_corpus.jsonl"
CORPUS = "qa/2wiki_corpus.jsonl"
SPLITS = ("train", "heldout")
_HELD_OUT = 5  # one in so many


def prompts(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """At most `count` questions of `split`; the same arguments always give the same ones."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {', '.join(SPLITS)}")
    with open(data_file(QUESTIONS), encoding="utf-8") as lines:
        rows = [(number, json.loads(line)) for number, line in enumerate(lines)]
    chosen = [(number, row) for number, row in rows if (number % _HELD_OUT == 0) == (split == "heldout")]
    random.Random(f"2wiki/{split}/{seed}").shuffle(chosen)
    for number, row in chosen[:count]:
        yield {"id": f"2wiki-{number}", "payload": {"question": row["question"], "answer": row["answer"]}}
