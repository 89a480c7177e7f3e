"""Workflows of two policies that write programs: a solver with a selector, and a solver with a tester.

The selector (`play_selector`) chooses one of two programs of the solver. Each program gets the reward 1 if it passes
all hidden tests. The selector gets 1 or 0 if exactly one program passes, 0.5 if both or neither do, and 0 if its text
has no choice; then A is taken. The trajectory's reward is that of the chosen program.

The tester (`play_tester`) writes two test cases for the solver's program. The solver tries again, with the result of
each case, only if the cases are readable and its program failed one of them and the hidden tests. Each program gets the
reward 1 if it passes all hidden tests; the trajectory's reward is that of the last program. The cases get 0.5 if the
reference solution passes them (they are valid), and another 0.5 if they then agree with the hidden tests about the
program.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from rillflow.agents.options import filler, read_options
from rillflow.agents.sandbox import Cases, Pairs, SandboxConfig, code_of, literal_cases, shared
from rillflow.agents.workflows.multi_policy import Options, checker, is_right, outcome, problem_of, user
from rillflow.config import RewardConfig
from rillflow.errors import WorkflowError

if TYPE_CHECKING:
    from rillflow.contracts import Episode

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


SELECTOR_PROMPTS = {
    "solve": (
        "Write a Python program for the task below. Think first, then give the whole program in one ```python block."
        "\n\nTask:\n{question}{example}"
    ),
    "select": (
        "Two programs were written for the same task. Find the one that is right in all cases, edge cases included,"
        " and end with <final>A</final> or <final>B</final>.\n\n"
        "Task:\n{question}{example}\n\nProgram A:\n{a}\n\nProgram B:\n{b}"
    ),
}
_CHOICE = re.compile(r"<final>\s*([AB])\s*</final>", re.IGNORECASE)


async def play_selector(episode: Episode) -> dict[str, float]:
    """Play one episode with the roles solver and selector. The payload is one of the reward `code`."""
    options = read_options("options", episode.options, CodeOptions)
    example = example_of(episode.payload)
    fill, check = filler(SELECTOR_PROMPTS, options.prompts), checker(episode, options.check)
    solver, selector, question = episode.role("solver"), episode.role("selector"), problem_of(episode)
    solve = user(fill("solve", question=question, example=example))
    a, b = await solver.ask_many(solve, 2, **options.settings_of("solver"))
    select = user(fill("select", question=question, example=example, a=a.text, b=b.text))
    selected, worth_a, worth_b = await asyncio.gather(
        selector.ask(select, **options.settings_of("selector")),
        check(a.text),
        check(b.text),
    )
    choice = choice_of(selected.text)
    picked = worth_of_choice(choice, is_right(worth_a), is_right(worth_b))
    for said, worth in ((a, worth_a), (b, worth_b), (selected, picked)):
        episode.reward(worth, call=said.call)
    episode.metric("candidates", (worth_a + worth_b) / 2)
    return outcome(episode, worth_b if choice == "B" else worth_a, selector=picked)


def choice_of(text: str) -> str | None:
    """Return the last `A` or `B` of a text, or None."""
    found = _CHOICE.findall(text)
    return found[-1].upper() if found else None


def worth_of_choice(choice: str | None, a_passes: bool, b_passes: bool) -> float:
    """Return the selector's reward."""
    if choice is None:
        return 0.0
    if a_passes == b_passes:
        return 0.5
    return float((choice == "A") == a_passes)


TESTER_PROMPTS = {
    "solve": (
        "Write a Python program for the task below. Think first, then give the whole program in one ```python block."
        "\n\nTask:\n{question}{example}"
    ),
    "test": (
        "Write two test cases that would show whether the program does what the task asks for. Choose cases that a"
        ' careless program gets wrong. Answer with a JSON list of two objects: {"input": "f(1, 2)", "output": "3"},'
        " where the input is a call of the task's function with plain Python values (or what the program reads) and the"
        " output the value that is right (or what it writes).\n\nTask:\n{question}{example}\n\nProgram:\n{program}"
    ),
    "retry": (
        "Your program for the task below failed a test. Find out why, then give the whole corrected program in one"
        " ```python block.\n\nTask:\n{question}{example}\n\nYour program:\n{program}\n\nTests:\n{results}"
    ),
}


class TesterOptions(CodeOptions):
    """The options of the workflow `solver_tester`."""

    sandbox: SandboxConfig = Field(SandboxConfig(), description="where programs meet the cases that a model wrote")


async def play_tester(episode: Episode) -> dict[str, float]:
    """Play one episode with the roles solver and tester. The payload is one of the reward `code`, with a reference
    solution."""
    options = read_options("options", episode.options, TesterOptions)
    example = example_of(episode.payload)
    fill, check = filler(TESTER_PROMPTS, options.prompts), checker(episode, options.check)
    reference = reference_of(episode.payload)
    sandbox = await asyncio.to_thread(shared, options.sandbox)  # the first call starts the sandbox
    solver, tester, question = episode.role("solver"), episode.role("tester"), problem_of(episode)
    settings = options.settings_of("solver")
    first = await solver.ask(user(fill("solve", question=question, example=example)), **settings)
    program = code_of(first.text)
    test = user(fill("test", question=question, example=example, program=program))
    tests, worth = await asyncio.gather(tester.ask(test, **options.settings_of("tester")), check(first.text))
    episode.reward(worth, call=first.call)
    episode.metric("first", worth)
    cases = written_cases(tests.text, episode.payload)
    if cases is None:
        episode.reward(0.0, call=tests.call)
        return outcome(episode, worth, tester=0.0)
    right, tried = await asyncio.gather(sandbox.grade(reference, cases), sandbox.grade(program, cases))
    tested = worth_of_cases(valid=right.ok, says=tried.ok, truth=is_right(worth))
    episode.reward(tested, call=tests.call)
    episode.metric("valid_cases", right.ok)
    if not tried.ok and not is_right(worth):
        results = feedback(tests.text, tried.cases)
        retry = user(fill("retry", question=question, example=example, program=program, results=results))
        second = await solver.ask(retry, **settings)
        worth = await check(second.text)
        episode.reward(worth, call=second.call)
    return outcome(episode, worth, tester=tested)


def worth_of_cases(*, valid: bool, says: bool, truth: bool) -> float:
    """Return the tester's reward; `says`: the program passes the cases, `truth`: it passes the hidden tests."""
    return 0.5 * (valid + (valid and says == truth))
