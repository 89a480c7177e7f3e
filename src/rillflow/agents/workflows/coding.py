"""What the workflows that write programs share: their task, its reference solution, and cases that a model wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from rillflow.agents.sandbox import Cases, Pairs, literal_cases
from rillflow.agents.workflows.wording import Options, problem_of
from rillflow.config import RewardConfig
from rillflow.errors import WorkflowError

if TYPE_CHECKING:
    from rillflow.contracts import Episode

CASES = 2  # that a model writes
_LONGEST_CASE = 2000  # characters of an input or an output


class CodeOptions(Options):
    check: str | list[RewardConfig] = Field("code", description="the reward that runs the hidden tests")


def code_problem_of(episode: Episode) -> str:
    """The task in words; where tests name the function that is wanted, with the first of them as an example."""
    tests = episode.payload.get("test_list")
    example = f"\n\nYour program should pass this test, and others:\n{tests[0]}" if tests else ""
    return problem_of(episode) + example


def reference_of(payload: Mapping[str, Any]) -> str:
    """A program that is right; WorkflowError where the data has none."""
    for key in ("code", "canonical_solution", "answer"):
        if isinstance(payload.get(key), str):
            # HumanEval's solutions go on where the prompt ends.
            return (str(payload.get("prompt", "")) if key == "canonical_solution" else "") + payload[key]
    raise WorkflowError("the prompt has no reference solution", "its payload needs `code` or `canonical_solution`")


def written_cases(text: str, payload: Mapping[str, Any]) -> Cases | Pairs | None:
    """The two cases in an answer; None where there are not exactly two that can be run.

    Of a task whose programs read and write text they are pairs of that; else `input` is a call of the function with
    plain values, and `output` the plain value that it gives.
    """
    rows = _json_list(text)
    if rows is None or len(rows) != CASES:
        return None
    pairs = [(row.get("input"), row.get("output")) for row in rows if isinstance(row, dict)]
    if len(pairs) != CASES or not all(isinstance(part, str) and len(part) <= _LONGEST_CASE for p in pairs for part in p):
        return None
    if "inputs" in payload:
        return Pairs(pairs=tuple((str(given), str(wanted)) for given, wanted in pairs))
    lines = [f"assert {given} == {wanted}" for given, wanted in pairs]
    if any("\n" in line for line in lines):
        return None
    cases = literal_cases("\n".join(lines))
    return cases if len(cases.cases) == CASES else None


def feedback(cases: Cases | Pairs, text: str, passed: tuple[bool, ...]) -> str:
    """A line for each case, as the model wrote it."""
    rows = _json_list(text) or []
    return "\n".join(
        f"{row['input']} should give {row['output']}: {'passed' if ok else 'failed'}"
        for row, ok in zip(rows, passed, strict=False)
    )


def _json_list(text: str) -> list[Any] | None:
    """The last JSON list in an answer; models write words and fences around it."""
    decoder, end = json.JSONDecoder(), len(text)
    while (start := text.rfind("[", 0, end)) >= 0:
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, list) and found and all(isinstance(row, dict) for row in found):
            return found
        end = start
    return None
