"""The reward of a benchmark's own answers, and scores over them: avg@k, pass@k, majority@k with confidence intervals.

Questions are a sample of a population, so every interval is over questions; the samples of one question never count as
independent. Samples without a reward are left out and counted separately.

For a majority vote each answer has a key: its text without the words around it, or None if it has nothing to vote for.
Two spellings of one formula are two keys; only the reward knows that they are equal.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rillflow.agents.rewards.answer_text import normalised
from rillflow.agents.rewards.base import Given, call, inside, text_of
from rillflow.agents.rewards.registry import Reward, load_reward
from rillflow.config import RewardConfig
from rillflow.dataflow.sources.benchmarks import GYM, benchmark
from rillflow.errors import RewardError
from rillflow.evaluate.records import Record

KEY = "benchmark"


async def reward(payload: Mapping[str, Any], answer: Any) -> float:
    """Return the score of the answer by the benchmark that the payload names. RewardError if it names none."""
    name = payload.get(KEY) or (GYM if "source_dataset" in payload else None)
    if not isinstance(name, str):
        raise RewardError("the prompt names no benchmark", "give `data.*.benchmark`, or name another reward")
    return float(await call(_loaded(name), Given(dict(payload), answer)))


@lru_cache
def _loaded(name: str) -> Reward:
    found = benchmark(name)
    return load_reward([RewardConfig(name=found.reward, options=dict(found.options))])


Kind = Literal["math", "code", "text"]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_BOXED = "\\boxed{"
_LONGEST = 100  # places before or behind the point that are written out


def vote(kind: Kind, answer: Any) -> str | None:
    """The key of an answer; programs have none: two that do the same look different."""
    text = text_of(answer)
    if not text or kind == "code":
        return None
    if kind == "math":
        return _math(text)
    return normalised(inside(text, "answer") or text) or None


def _math(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        return _canonical(boxed)
    _, marked, after = text.rpartition("####")
    numbers = _NUMBER.findall(after if marked else text)
    return _canonical(numbers[0] if marked else numbers[-1]) if numbers else None


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{…}, with balanced braces."""
    begin = text.rfind(_BOXED)
    if begin < 0:
        return None
    depth, start = 1, begin + len(_BOXED)
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None


def _canonical(text: str) -> str | None:
    plain = re.sub(r"\s+|\\[,;! ]|\\left|\\right|\$", "", text).rstrip(".")
    try:
        number = Decimal(plain.replace(",", ""))
        # 1e999999 is short, its digits are not: it votes as it is written.
        if number.is_finite() and abs(number.adjusted()) <= _LONGEST:
            return f"{number.normalize():f}"
    except ArithmeticError:
        pass
    return plain or None


RIGHT = 1.0 - 1e-9
LEVEL = 0.95
RESAMPLES = 2000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """A mean over questions. `bootstrap` resamples the questions; `normal` is the mean ± z standard errors; `wilson`
    takes each question for one trial, and so stays honest where all are wrong or all are right."""

    value: float
    bootstrap: Interval
    normal: Interval
    wilson: Interval


@dataclass(frozen=True)
class Scores:
    """The scores of one benchmark. `average` is avg@k, `passed` pass@j by j, `majority` majority@k where answers can be
    compared.

    `no_reward` counts the samples without a reward by cause; their tokens are unknown. `mean_tokens` is the mean of the
    others, and `cut` the share of them whose answer was cut at its token limit.
    """

    questions: int
    samples: int
    rewarded: int
    no_reward: dict[str, int]
    average: Score | None
    passed: dict[int, Score]
    majority: Score | None
    mean_tokens: float
    cut: float

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def score(records: Sequence[Record], *, seed: int) -> Scores:
    """Return the scores of these records, one for each sample."""
    questions: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda one: (one.id, one.sample)):
        questions[record.id].append(record)
    rated = {name: [one for one in found if one.reward is not None] for name, found in questions.items()}
    rated = {name: found for name, found in rated.items() if found}
    played = [one for found in rated.values() for one in found]
    votes = [majority(found) for found in rated.values()]
    return Scores(
        questions=len(questions),
        samples=len(records),
        rewarded=len(played),
        no_reward=dict(Counter(one.cause for one in records if one.reward is None)),
        average=_scored([_mean([one.reward or 0.0 for one in found]) for found in rated.values()], seed),
        passed=_passes(list(rated.values()), seed),
        majority=_scored(votes, seed) if any(one.vote for one in records) else None,
        mean_tokens=_mean([one.tokens for one in played]),
        cut=_mean([float(one.cut) for one in played]),
    )


def pass_at(right: int, samples: int, k: int) -> float:
    """The chance that one of k answers drawn from `samples` without putting back is right: 1 - C(n-c, k) / C(n, k)."""
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(samples - right + 1, samples + 1))


def majority(records: Sequence[Record]) -> float:
    """The mean reward of the answers that got most votes; of all that did where several got as many. Answers without
    a key do not vote; where none votes the majority has no answer, which is wrong."""
    votes = Counter(one.vote for one in records if one.vote is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [one.reward for one in records if one.vote is not None and votes[one.vote] == most]
    return _mean([value for value in winners if value is not None])


def _passes(rated: Sequence[Sequence[Record]], seed: int) -> dict[int, Score]:
    """For 1, 2, 4, … and the fewest samples that a question has."""
    least = min(map(len, rated), default=0)
    sizes = sorted({size for size in (*(1 << bit for bit in range(20)), least) if 0 < size <= least})
    passes: dict[int, Score] = {}
    for k in sizes:
        values = [pass_at(sum((one.reward or 0.0) >= RIGHT for one in found), len(found), k) for found in rated]
        scored = _scored(values, seed)
        assert scored is not None
        passes[k] = scored
    return passes


def _scored(values: Sequence[float], seed: int) -> Score | None:
    if not values:
        return None
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    return Score(mean, bootstrap(array, seed), _normal(array), wilson(mean, len(array)))


def bootstrap(values: Floats, seed: int) -> Interval:
    """Return the bootstrap 95 % interval of the mean over questions; the same for the same seed."""
    draws = np.random.RandomState(seed & 0xFFFFFFFF)  # numpy never changes its stream
    size = len(values)
    means = [values[draws.randint(0, size, size)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def _normal(values: Floats) -> Interval:
    mean, size = float(values.mean()), len(values)
    error = float(values.std(ddof=1)) / math.sqrt(size) if size > 1 else 0.0
    return Interval(mean - _z() * error, mean + _z() * error)


def wilson(share: float, trials: int) -> Interval:
    """Return the interval of a share of successful trials. A mean outside of 0 to 1 is clipped to it."""
    share, z = min(max(share, 0.0), 1.0), _z()
    whole = 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / whole
    reach = z / whole * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Interval(max(0.0, middle - reach), min(1.0, middle + reach))


def _z() -> float:
    return NormalDist().inv_cdf((1 + LEVEL) / 2)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
