"""What workflows that write programs share: the task, its reference solution, and test cases that a model wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from rillflow.agents.sandbox import Cases, Pairs, literal_cases
from rillflow.agents.workflows.multi_policy import Options
from rillflow.config import RewardConfig
from rillflow.errors import WorkflowError

CASES = 2  # test cases that a model writes
_LONGEST = 2000  # characters of an input or an output
_TRIES = 256  # brackets at which the list may begin; cases contain brackets too


class CodeOptions(Options):
    """The options of a workflow that writes programs."""

    check: str | list[RewardConfig] = Field("code", description="the reward that runs the hidden tests")


def example_of(payload: Mapping[str, Any]) -> str:
    """Return the first test, which names the wanted function, or an empty string."""
    tests = payload.get("test_list")
    return f"\n\nYour program should pass this test, and others:\n{tests[0]}" if tests else ""


def reference_of(payload: Mapping[str, Any]) -> str:
    """Return the reference solution; WorkflowError if the payload has none."""
    for key in ("code", "canonical_solution", "answer"):
        program = payload.get(key)
        if isinstance(program, str):
            # HumanEval's solutions continue the prompt.
            return f"{payload.get('prompt', '')}{program}" if key == "canonical_solution" else program
    raise WorkflowError("the prompt has no reference solution", "its payload needs `code` or `canonical_solution`")


def written_cases(text: str, payload: Mapping[str, Any]) -> Cases | Pairs | None:
    """Return the test cases of an answer, or None unless there are exactly two that can be run.

    If the task's programs read and write text, a case is a pair of texts. Otherwise `input` is a call of the function
    with plain values and `output` is its value.
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
        return None  # it would be two asserts
    cases = literal_cases("\n".join(lines))
    return cases if len(cases.cases) == CASES else None


def feedback(text: str, passed: Sequence[bool]) -> str:
    """Return a line for each case of an answer, with its result."""
    return "\n".join(
        f"{row['input']} should give {_text(row['output'])}: {'passed' if ok else 'failed'}"
        for row, ok in zip(_rows(text), passed, strict=True)
    )


def _text(value: Any) -> Any:
    """Return a value as text: models write numbers and lists instead of text."""
    return value if isinstance(value, str) or value is None else repr(value)


def _rows(text: str) -> list[dict[str, Any]]:
    """Return the last list of JSON objects in an answer, which may have other text around it."""
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
