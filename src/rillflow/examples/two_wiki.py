"""Questions of 2WikiMultiHopQA whose answers occur in the corpus beside them, for the workflow `search_agent`.

The files are read from the folder of data sets. Every fifth question is held out for every seed; the seed only gives
the order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from rillflow.agents.environments.splits import check_split
from rillflow.agents.tools.corpus import Corpus, data_file, listed
from rillflow.agents.workflows.question import INSTRUCTIONS

QUESTIONS = "qa/2wiki_questions_in_corpus.jsonl"
CORPUS = "qa/2wiki_corpus.jsonl"
_HELD_OUT = 5  # every fifth question


def prompts(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield at most `count` questions of `split`."""
    check_split(split)
    with open(data_file(QUESTIONS), encoding="utf-8") as lines:
        rows = [(number, json.loads(line)) for number, line in enumerate(lines)]
    chosen = [(number, row) for number, row in rows if (number % _HELD_OUT == 0) == (split == "heldout")]
    random.Random(f"2wiki/{split}/{seed}").shuffle(chosen)
    for number, row in chosen[:count]:
        yield {"id": f"2wiki-{number}", "payload": {"question": row["question"], "answer": row["answer"]}}


def demonstrations(split: str, count: int, seed: int, passages: int, characters: int) -> Iterator[dict[str, Any]]:
    """Yield rows for sft: search for the question with the agent's own tool, then answer.

    Questions whose answer is not in the passages found are left out: they would teach the model to invent answers.
    """
    corpus = Corpus.open(CORPUS)
    for prompt in prompts(split, count, seed):
        question, answer = prompt["payload"]["question"], prompt["payload"]["answer"]
        found = listed(corpus.search(question, passages), characters)
        if answer.lower() not in found.lower():
            continue
        messages = [
            {"role": "user", "content": f"{INSTRUCTIONS}\n\nQuestion: {question}"},
            {"role": "assistant", "content": f"<search>{question}</search>"},
            {"role": "user", "content": f"<information>{found}</information>"},
            {"role": "assistant", "content": f"<answer>{answer}</answer>"},
        ]
        yield {"id": prompt["id"], "payload": {"messages": messages}}
