"""A solver and a tester of programs: the tester writes two cases for the solver's program, which may try once more.

The solver tries again, and is told how each case went, only if the cases could be read and its program failed one of
them and the hidden tests. Each program is worth 1 if it passes all hidden tests; the trajectory is worth what the last
one is. The cases are worth a half if the reference solution passes them all (they are valid), and another half if they
then say of the program what the hidden tests say.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pydantic import Field

from rillflow.agents.sandbox import SandboxConfig, code_of, shared
from rillflow.agents.workflows.coding import CodeOptions, example_of, feedback, reference_of, written_cases
from rillflow.agents.workflows.wording import checker, filler, is_right, options_of, outcome, problem_of, user

if TYPE_CHECKING:
    from rillflow.contracts import Episode

PROMPTS = {
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
    sandbox: SandboxConfig = Field(SandboxConfig(), description="where programs meet the cases that a model wrote")


async def play(episode: Episode) -> dict[str, float]:
    """Roles: solver, tester. The payload is one that the reward `code` understands, with a reference solution."""
    options = options_of(episode, TesterOptions)
    example = example_of(episode.payload)
    fill, check = filler(PROMPTS, options.prompts), checker(episode, options.check)
    reference = reference_of(episode.payload)
    sandbox = await asyncio.to_thread(shared, options.sandbox)  # the first one takes a moment to be built
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
    """`says`: the program passes the cases; `truth`: it passes the hidden tests."""
    return 0.5 * (valid + (valid and says == truth))
