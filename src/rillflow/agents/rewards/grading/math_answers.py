"""Whether an answer to a question of mathematics means the same as the right one (math-verify)."""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any

_library: Any = importlib.import_module("math_verify")

# It warns of the deadlines that we switch off: ours end the process, its own are signals that sympy can swallow.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
_BOXED = _library.LatexExtractionConfig(boxed_match_priority=0)
_ANYWHERE = (_BOXED, _library.ExprExtractionConfig())
_MARKED = re.compile(r"\\boxed|\\fbox|\$|\\\(|\\\[")
_BARE = 200  # characters of an answer that may be nothing but an expression


def grade(gold: str, answer: str, *, boxed: bool) -> float:
    """1.0 or 0.0; ValueError where the right answer cannot be understood. `boxed`: only \\boxed{…} counts."""
    right = _parsed(_expression(gold), boxed=True)
    if not right:
        raise ValueError(f"the right answer {gold[-80:]!r} cannot be read as mathematics")
    said = _final(answer)
    if _same(right, _parsed(said, boxed=boxed)):
        return 1.0
    # An answer that is an expression and nothing else: without $ around it only its numbers are found.
    bare = not boxed and len(said) <= _BARE and "\n" not in said.strip() and not _MARKED.search(said)
    return float(bare and _same(right, _parsed(f"\\boxed{{{said.strip()}}}", boxed=True)))


def _expression(gold: str) -> str:
    """The final answer of a solution: after GSM8K's `####`, in \\boxed{…}, or all of it."""
    gold = _final(gold).strip()
    return gold if "\\boxed" in gold else f"\\boxed{{{gold.removeprefix('$').removesuffix('$')}}}"


def _final(text: str) -> str:
    return text.rpartition("####")[2]


def _parsed(text: str, *, boxed: bool) -> list[Any]:
    if boxed and "\\boxed" not in text:
        return []
    config = (_BOXED,) if boxed else _ANYWHERE
    found: list[Any] = _library.parse(text, config, parsing_timeout=None)
    return found


def _same(right: list[Any], said: list[Any]) -> bool:
    return bool(said) and bool(_library.verify(right, said, timeout_seconds=None))
