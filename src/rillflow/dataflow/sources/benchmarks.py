"""Public benchmarks as prompts: one table, a row for each. Their files are read where they are, never copied.

A payload has `question`, the prompt in our words; `problem`, the bare question, which leakage checks compare; `answer`,
the right answer; and `benchmark`, the name by which a reward is chosen. Code benchmarks keep the keys of their tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from rillflow.config import SourceConfig
from rillflow.dataflow.sources.readers import open_reasoning_gym
from rillflow.dataflow.sources.rows import Rows, spooled
from rillflow.errors import ConfigError, DataError, did_you_mean

VARIABLE = "RILLFLOW_DATA"
GYM = "reasoning_gym:"
GYM_SEED = 1 << 30  # far from the seeds that recipes train with
GYM_SIZE = 200
_TWO_WIKI_HELD_OUT = 5  # one row of each five, from the first: `examples.two_wiki` trains on all others
_CHECKOUT = Path(__file__).resolve().parents[4]

Row = dict[str, Any]
Convert = Callable[[Row], Row | None]

MATH = "{problem}\n\nThink step by step, then write the final answer inside \\boxed{}."
CODE = (
    "{problem}\n\nWrite it in Python. It has to pass tests like these:\n\n{tests}\n\nAnswer with one code block that "
    "holds everything that is needed."
)
COMPLETE = (
    "Complete this Python function:\n\n```python\n{problem}```\n\nAnswer with one code block that holds all of it."
)
SHORT = (
    "{problem}\n\nThink first if you need to, then write the answer, a few words at most, between <answer> and "
    "</answer>."
)
READ = "Read these paragraphs.\n\n{paragraphs}\n\n" + SHORT


@dataclass(frozen=True)
class Benchmark:
    """A benchmark. `convert` returns the keys of a payload that a row has, or None for a row that is left out.
    `max_tokens` is the default length of an answer; `kind` decides how two answers are compared. One row of every
    `every` rows is used."""

    file: str
    convert: Convert
    template: str
    kind: Literal["math", "code", "text"]
    reward: str
    options: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 512
    id_key: str = "id"
    every: int = 1


def _gsm8k(row: Row) -> Row:
    return {"problem": row["question"], "answer": row["answer"].rpartition("####")[2].strip().replace(",", "")}


def _problem(row: Row) -> Row:
    return {"problem": row["problem"], "answer": _number(row["answer"])}


def _svamp(row: Row) -> Row:
    body = row["Body"].rstrip(". ")
    return {"problem": f"{body}. {row['Question']}", "answer": _number(row["Answer"])}


def _asdiv(row: Row) -> Row | None:
    """Leave out rows whose answer is not a single number (names, times, pairs)."""
    found = re.fullmatch(r"(-?[\d.,/]+)(?: \([^)]*\))?", row["answer"])
    return {"problem": f"{row['body']} {row['question']}", "answer": found[1].replace(",", "")} if found else None


def _mawps(row: Row) -> Row:
    return {"problem": row["input"], "answer": _number(row["target"])}


def _minerva(row: Row) -> Row:
    return {"problem": row["problem"], "answer": row["solution"]}


def _mbpp(row: Row) -> Row:
    kept = ("task_id", "code", "test_list", "test_setup_code", "test_imports", "challenge_test_list")
    said = {key: row[key] for key in kept if key in row}
    return {"problem": row.get("text") or row["prompt"], "tests": "\n".join(row["test_list"]), **said}


def _humaneval(row: Row) -> Row:
    kept = ("task_id", "prompt", "entry_point", "test", "canonical_solution")
    return {"problem": row["prompt"], **{key: row[key] for key in kept}}


def _answered(row: Row) -> Row:
    return {"problem": row["question"], "answer": [row["answer"]], "titles": row["titles"]}


def _hotpot(row: Row) -> Row:
    paragraphs = "\n\n".join(f"{title}: {text}" for title, text in zip(row["titles"], row["paragraphs"], strict=True))
    return _answered(row) | {"paragraphs": paragraphs}


def _golden(row: Row) -> Row:
    return {"problem": row["question"], "answer": row["golden_answers"]}


def _number(value: Any) -> str:
    """43.0 is 43."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


_TAGGED = {"inside": "answer"}
BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark("math/gsm8k_test.jsonl", _gsm8k, MATH, "math", "math"),
    "gsm8k_train": Benchmark("math/gsm8k_train.jsonl", _gsm8k, MATH, "math", "math"),
    "svamp": Benchmark("math/svamp.jsonl", _svamp, MATH, "math", "math", id_key="idx"),
    "asdiv": Benchmark("math/asdiv.jsonl", _asdiv, MATH, "math", "math", id_key="idx"),
    "mawps": Benchmark("math/mawps.jsonl", _mawps, MATH, "math", "math", id_key="idx"),
    "math500": Benchmark("math/math500.jsonl", _problem, MATH, "math", "math", max_tokens=2048, id_key="unique_id"),
    "aime24": Benchmark("math/aime24.jsonl", _problem, MATH, "math", "math", max_tokens=4096),
    "aime25": Benchmark("math/aime25.jsonl", _problem, MATH, "math", "math", max_tokens=4096),
    "amc23": Benchmark("math/amc23.jsonl", _problem, MATH, "math", "math", max_tokens=4096),
    "minerva_math": Benchmark("math/minerva_math.jsonl", _minerva, MATH, "math", "math", max_tokens=2048, id_key="idx"),
    "mbpp": Benchmark("code/mbpp.jsonl", _mbpp, CODE, "code", "code", id_key="task_id"),
    "mbpp_sanitized": Benchmark("code/mbpp_sanitized.jsonl", _mbpp, CODE, "code", "code", id_key="task_id"),
    "humaneval": Benchmark("code/humaneval.jsonl", _humaneval, COMPLETE, "code", "code", id_key="task_id"),
    "2wiki": Benchmark(
        "qa/2wiki_questions_in_corpus.jsonl",
        _answered,
        SHORT,
        "text",
        "exact_match",
        _TAGGED,
        every=_TWO_WIKI_HELD_OUT,
    ),
    "hotpot": Benchmark("qa/hotpot_distractor_100.jsonl", _hotpot, READ, "text", "exact_match", _TAGGED),
    "bamboogle": Benchmark("qa/bamboogle.jsonl", _golden, SHORT, "text", "exact_match", _TAGGED),
    "triviaqa": Benchmark("qa/triviaqa.jsonl", _golden, SHORT, "text", "exact_match", _TAGGED),
    "popqa": Benchmark("qa/popqa.jsonl", _golden, SHORT, "text", "exact_match", _TAGGED),
}


def data_folder() -> Path:
    """Return the folder of the public data sets: the variable's, else the one beside a checkout."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else _CHECKOUT.parent / "shared" / "data"


def benchmark(name: str) -> Benchmark:
    """Return the benchmark of this name; raises ConfigError with the nearest name."""
    if name.startswith(GYM):
        return Benchmark("", dict, "{problem}", "text", "reasoning_gym")
    if name not in BENCHMARKS:
        raise ConfigError(
            f"there is no benchmark {name!r}",
            f"{did_you_mean(name, BENCHMARKS)}there are {', '.join(BENCHMARKS)} and {GYM}NAME",
        )
    return BENCHMARKS[name]


def open_benchmark(config: SourceConfig) -> Rows:
    assert config.benchmark is not None
    found = benchmark(config.benchmark)
    if config.benchmark.startswith(GYM):
        return _open_gym(config)
    template = _template(config, found)
    return spooled(config.benchmark, "row", _payloads(config.benchmark, found, template, config.limit))


def _open_gym(config: SourceConfig) -> Rows:
    """Return entries of one task family from a separate seed, so that no run trains on them."""
    assert config.benchmark is not None
    arguments = {"seed": GYM_SEED, "size": config.limit or GYM_SIZE, **config.arguments}
    name = config.benchmark.removeprefix(GYM)
    return open_reasoning_gym(SourceConfig(reasoning_gym=name, arguments=arguments, limit=config.limit))


def _template(config: SourceConfig, found: Benchmark) -> str:
    given = dict(config.arguments)
    template = given.pop("template", found.template)
    if given or not isinstance(template, str) or "{problem}" not in template:
        raise ConfigError(
            f"the benchmark {config.benchmark} takes a `template` with {{problem}} in it as its only argument, "
            f"not {config.arguments!r:.80}",
            "check data.*.arguments",
        )
    return template


def _payloads(name: str, found: Benchmark, template: str, limit: int | None) -> Iterator[tuple[str, dict[Any, Any]]]:
    count = 0
    for number, row in enumerate(_lines(name, found), start=1):
        if limit is not None and count >= limit:
            return
        payload = found.convert(row) if (number - 1) % found.every == 0 else None
        if payload is not None:
            count += 1
            own = row.get(found.id_key)
            question = filled(template, payload)
            yield str(number if own is None else own), {"question": question, **payload, "benchmark": name}


def filled(template: str, payload: Row) -> str:
    """The template with each `{key}` of the payload's texts in its place; other braces stay as they are."""
    texts = {key: value for key, value in payload.items() if isinstance(value, str)}
    return re.sub(r"\{(\w+)\}", lambda found: texts.get(found[1], found[0]), template)


def _lines(name: str, found: Benchmark) -> Iterator[Row]:
    path = data_folder() / found.file
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield msgspec.json.decode(line, type=dict[str, Any])
                except msgspec.DecodeError as error:
                    raise DataError(
                        f"{path}: line {number} is not a JSON object: {error}", "get the file anew"
                    ) from error
    except OSError as error:
        raise DataError(
            f"the benchmark {name} is not at hand: cannot read {path}: {error.strerror}",
            f"set {VARIABLE} to the folder that has {found.file}",
        ) from error
