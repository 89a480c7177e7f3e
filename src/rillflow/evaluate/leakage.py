"""Find questions of a test among the training prompts.

Two comparisons. *Exact*: the texts are equal without case, punctuation and space. *Runs*: a number of consecutive words
(13 by default) of a test question also occur in a training prompt. Only the runs of the test are kept, as 64-bit hashes
and at most `MOST_RUNS`; training prompts are read once and not kept, so memory does not grow with them. A question that
is shorter than a run can only be found exactly.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from rillflow.contracts import PromptSource
from rillflow.errors import ConfigError
from rillflow.types import Prompt

WORDS = 13
MOST_RUNS = 20_000_000
FIELDS = ("problem", "question", "Question", "prompt", "text", "input", "Body")
_NAMES = ("id", "idx", "source", "benchmark")
_WORD = re.compile(r"\w+")

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Overlap:
    """A test question that was found. `share` is that of its runs which stand in the prompt; 1 where it is exact."""

    test: str
    train: str
    exact: bool
    share: float


@dataclass(frozen=True)
class Leakage:
    """`overlaps` have each test question once at most, with the prompt that has most of it."""

    train: int
    test: int
    words: int
    overlaps: list[Overlap]

    @property
    def exact(self) -> int:
        return sum(one.exact for one in self.overlaps)

    def plain(self) -> dict[str, Any]:
        return {"exact": self.exact, "runs": len(self.overlaps) - self.exact, **asdict(self)}


def look(train: PromptSource, test: PromptSource, *, words: int = WORDS, field: str | None = None) -> Leakage:
    """All test questions of which something stands among the training prompts."""
    index = _Index(_prompts(test), words, field)
    found: dict[int, Overlap] = {}
    for prompt in _prompts(train):
        for overlap, place in index.overlaps(prompt, field):
            known = found.get(place)
            if known is None or (overlap.exact, overlap.share) > (known.exact, known.share):
                found[place] = overlap
    return Leakage(train.length, test.length, words, [found[place] for place in sorted(found)])


def same(train: PromptSource, test: PromptSource, *, most: int) -> list[str]:
    """Ids of test prompts that stand whole among the first `most` training prompts: the cheap look.

    Whole payloads are compared, without their ids: prompts of an environment may ask the same in other worlds.
    """
    known = {_whole(prompt): prompt.id for prompt in _prompts(test, most)}
    found = {known[key] for prompt in _prompts(train, most) if (key := _whole(prompt)) in known}
    return sorted(found)


def _prompts(source: PromptSource, most: int | None = None) -> Iterator[Prompt]:
    for index in range(source.length if most is None else min(source.length, most)):
        yield source.at(index)


def _whole(prompt: Prompt) -> int:
    problem = prompt.payload.get("problem") if "benchmark" in prompt.payload else None
    if isinstance(problem, str):
        return _hash(words_of(problem))
    kept = {key: value for key, value in prompt.payload.items() if key not in _NAMES}
    return xxh3_64_intdigest(msgspec.json.encode(kept, order="deterministic"))


def text_of(prompt: Prompt, field: str | None = None) -> str:
    """Return the text of a prompt to compare: the named key, else the first of the usual keys, else all its texts."""
    payload = prompt.payload
    if field is not None:
        if not isinstance(payload.get(field), str):
            raise ConfigError(f"prompt {prompt.id} has no text under {field!r}", f"it has {', '.join(payload)}")
        return str(payload[field])
    usual = next((payload[key] for key in FIELDS if isinstance(payload.get(key), str)), None)
    return usual if usual is not None else "\n".join(_texts(payload))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def words_of(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _runs(words: list[str], size: int) -> list[int]:
    return [_hash(words[at : at + size]) for at in range(len(words) - size + 1)]


def _hash(words: list[str]) -> int:
    return xxh3_64_intdigest(" ".join(words).encode())


class _Index:
    """The test's texts and runs, as hashes in sorted arrays."""

    def __init__(self, prompts: Iterable[Prompt], size: int, field: str | None) -> None:
        self._size = size
        self._ids: list[str] = []
        self._counts: list[int] = []
        self._whole: dict[int, list[int]] = {}
        runs, places = array("Q"), array("L")
        for place, prompt in enumerate(prompts):
            words = words_of(text_of(prompt, field))
            own = set(_runs(words, size))
            self._ids.append(prompt.id)
            self._counts.append(len(own))
            self._whole.setdefault(_hash(words), []).append(place)
            runs.extend(own)
            places.extend([place] * len(own))
            if len(runs) > MOST_RUNS:
                raise ConfigError(f"the test has more than {MOST_RUNS} runs of words", "compare a part of it")
        hashes = np.asarray(runs, np.uint64)
        order = np.argsort(hashes, kind="stable")
        self._runs: Hashes = hashes[order]
        self._places = np.asarray(places, np.int64)[order]

    def overlaps(self, prompt: Prompt, field: str | None) -> Iterator[tuple[Overlap, int]]:
        """Return the matches of one training prompt, each with the test question's place."""
        words = words_of(text_of(prompt, field))
        same = self._whole.get(_hash(words), [])
        for place in same:
            yield Overlap(self._ids[place], prompt.id, exact=True, share=1.0), place
        for place, count in self._shared(words).items():
            if place not in same:
                yield Overlap(self._ids[place], prompt.id, exact=False, share=count / self._counts[place]), place

    def _shared(self, words: list[str]) -> dict[int, int]:
        """Return how many runs of each test question occur in these words."""
        own = np.unique(np.asarray(_runs(words, self._size), np.uint64))
        first = np.searchsorted(self._runs, own, "left")
        last = np.searchsorted(self._runs, own, "right")
        found: dict[int, int] = {}
        for start, end in zip(first[first < last], last[first < last], strict=True):
            for place in self._places[start:end].tolist():
                found[place] = found.get(place, 0) + 1
        return found
