"""Lessons for the workflow `search_agent`: how to search, read and answer. They teach the form, and to read.

What a lesson finds is what the agent's own tool finds, so a lesson looks like an episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rillflow.agents.tools import two_wiki
from rillflow.agents.tools.corpus import Corpus
from rillflow.agents.tools.search import listed
from rillflow.agents.workflows.search_agent import INSTRUCTIONS


def demonstrations(split: str, count: int, seed: int, passages: int, characters: int) -> Iterator[dict[str, Any]]:
    """Of sft: the question is searched for, the answer given, as far as what is found holds it."""
    corpus = Corpus.open(two_wiki.CORPUS)
    for prompt in two_wiki.prompts(split, count, seed):
        question, answer = prompt["payload"]["question"], prompt["payload"]["answer"]
        found = listed(corpus.search(question, passages), characters)
        if answer.lower() not in found.lower():
            continue  # it would teach to make things up
        messages = [
            {"role": "user", "content": f"{INSTRUCTIONS}\n\nQuestion: {question}"},
            {"role": "assistant", "content": f"<search>{question}</search>"},
            {"role": "user", "content": f"<information>{found}</information>"},
            {"role": "assistant", "content": f"<answer>{answer}</answer>"},
        ]
        yield {"id": prompt["id"], "payload": {"messages": messages}}
