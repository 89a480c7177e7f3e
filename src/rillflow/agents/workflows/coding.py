"""What the workflows that write programs share: their task, its reference solution, and cases that a model wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from rillflow.agents.sandbox import Cases, Pairs, literal_cases
from rillflow.agents.workflows.wording import Options
from rillflow.config import RewardConfig
from rillflow.errors import WorkflowError

CASES = 2  # that a model writes
_LONGEST = 2000  # characters of an input or an output
_TRIES = 256  # brackets that may begin the list: cases have brackets of their own


class CodeOptions(Options):
    check: str | list[RewardConfig] = Field("code", description="the reward that runs the hidden tests")


def example_of(payload: Mapping[str, Any]) -> str:
    """The first of the tests, where they name the function that is wanted; else nothing."""
    tests = payload.get("test_list")
    return f"\n\nYour program should pass this test, and others:\n{tests[0]}" if tests else ""


def reference_of(payload: Mapping[str, Any]) -> str:
    """A program that is right; WorkflowError where the data has none."""
    for key in ("code", "canonical_solution", "answer"):
        program = payload.get(key)
        if isinstance(program, str):
            # HumanEval's solutions go on where the prompt ends.
            return f"{payload.get('prompt', '')}{program}" if key == "canonical_solution" else program
    raise WorkflowError("the prompt has no reference solution", "its payload needs `code` or `canonical_solution`")


def written_cases(text: str, payload: Mapping[str, Any]) -> Cases | Pairs | None:
    """The two cases in an answer; None where there are not exactly two that can be run.

    Of a task whose programs read and write text they are pairs of that; else `input` is a call of the function with
    plain values, and `output` the plain value that it gives.
    """
    rows = _rows(text)
    pairs = [(row.get("input"), _text(row.get("output"))) for row in rows]
    if len(pairs) != CASES or not all(
        isinstance(part, str) and len(part) <= _LONGEST for pair in pairs for part in pair
    ):
        return None
    if "inputs" in payload:
        return Pairs(pairs=tuple((str(given), str(wanted)) for given, wanted in pairs))
    lines = [f"assert {given} == {wanted}" for given, wanted in pairs]
    if any(len(line.splitlines()) != 1 for line in lines):
        return None  # two asserts in one
    cases = literal_cases("\n".join(lines))
    return cases if len(cases.cases) == CASES else None


def feedback(text: str, passed: Sequence[bool]) -> str:
    """A line for each of an answer's cases, as the model wrote it."""
    return "\n".join(
        f"{row['input']} should give {_text(row['output'])}: {'passed' if ok else 'failed'}"
        for row, ok in zip(_rows(text), passed, strict=True)
    )


def _text(value: Any) -> Any:
    """Models write numbers and lists as such, where text was asked for."""
    return value if isinstance(value, str) or value is None else repr(value)


def _rows(text: str) -> list[dict[str, Any]]:
    """The last list of JSON objects in an answer; models write words and fences around it."""
    decoder, end = json.JSONDecoder(), len(text)
    for _ in range(_TRIES):
        start = text.rfind("[", 0, end)
        if start < 0:
            break
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, list) and found and all(isinstance(row, dict) for row in found):
            return found
        end = start
    return []
