"""The graders, which run in worker processes: mathematics, regular expressions, and reasoning-gym's scorers.

Each may hang or need much memory. Invariant: a process that computes longer than it may ends itself by a signal, even
inside C code and even if its parent has died.
"""

from __future__ import annotations

import importlib
import logging
import re
import resource
import signal
from collections.abc import Callable
from functools import cache
from typing import Any

OUT_OF_TIME = signal.SIGPROF
LOAD = 0.0  # seconds of a question that only loads the grader
_MEMORY = 4 << 30  # bytes of address space
_MARKED = re.compile(r"\\boxed|\\fbox|\$|\\\(|\\\[")
_BARE = 200  # characters of an answer that may consist of an expression alone
_TUPLES = ("arc_agi", "rearc")  # their scorers compare tuples, which JSON turns into lists


def start() -> Callable[[dict[str, Any]], float]:
    """Limit this process and return its handler."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(OUT_OF_TIME, signal.SIG_DFL)  # the default ends the process at once
    return handle


def handle(question: dict[str, Any]) -> float:
    """Return the grade. `seconds` counts computing time, so a busy machine fails no answer."""
    load, grade = GRADERS[question["name"]]
    load()
    if question["seconds"] == LOAD:
        return 0.0
    signal.setitimer(signal.ITIMER_PROF, question["seconds"])
    try:
        return float(grade(**question["arguments"]))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# Mathematics, by math-verify


@cache
def _math() -> Any:
    # It warns that its own deadlines are off. They are signals, which sympy can swallow; ours end the process.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return importlib.import_module("math_verify")


def grade_math(gold: str, answer: str, *, boxed: bool) -> float:
    """Return 1.0 if the answer means the same as the right one, else 0.0; with `boxed` only \\boxed{…} counts.

    Raise ValueError if the right answer cannot be parsed.
    """
    right = _parsed(_expression(gold), boxed=True)
    if not right:
        raise ValueError(f"the right answer {gold[-80:]!r} cannot be read as mathematics")
    said = _final(answer)
    if _same(right, _parsed(said, boxed=boxed)):
        return 1.0
    # math-verify finds only numbers in an expression without $ around it, so a bare expression is boxed.
    bare = not boxed and len(said) <= _BARE and "\n" not in said.strip() and not _MARKED.search(said)
    return float(bare and _same(right, _parsed(f"\\boxed{{{said.strip()}}}", boxed=True)))


def _expression(gold: str) -> str:
    """Return the final answer of a solution: after GSM8K's `####`, in \\boxed{…}, or all of it."""
    gold = _final(gold).strip()
    return gold if "\\boxed" in gold else f"\\boxed{{{gold.removeprefix('$').removesuffix('$')}}}"


def _final(text: str) -> str:
    return text.rpartition("####")[2]


def _parsed(text: str, *, boxed: bool) -> list[Any]:
    if boxed and "\\boxed" not in text:
        return []
    in_box = _math().LatexExtractionConfig(boxed_match_priority=0)
    config = (in_box,) if boxed else (in_box, _math().ExprExtractionConfig())
    found: list[Any] = _math().parse(text, config, parsing_timeout=None)
    return found


def _same(right: list[Any], said: list[Any]) -> bool:
    return bool(said) and bool(_math().verify(right, said, timeout_seconds=None))


# Regular expressions, whose backtracking can take years


def grade_pattern(pattern: str, text: str) -> float:
    """Return 1.0 if the whole text matches, else 0.0; a dot also matches a line break."""
    return float(re.fullmatch(pattern, text, re.DOTALL) is not None)


# reasoning-gym


@cache
def _gym() -> Any:
    return importlib.import_module("reasoning_gym")


@cache
def _scorer(source: str) -> Any:
    return _gym().get_score_answer_fn(source)


def grade_gym(entry: dict[str, Any], answer: str) -> float:
    """Return the score, from 0 to 1, that the entry's own dataset gives the answer."""
    source = entry["source_dataset"]
    if source in _TUPLES:
        grid = tuple(tuple(row) for row in entry["metadata"]["output"])
        entry = entry | {"metadata": entry["metadata"] | {"output": grid}}
    return float(_scorer(source)(answer, entry))


# By name: how the grader is loaded, and the grader.
GRADERS: dict[str, tuple[Callable[[], Any], Callable[..., float]]] = {
    "math": (_math, grade_math),
    "pattern": (lambda: None, grade_pattern),
    "reasoning_gym": (_gym, grade_gym),
}
