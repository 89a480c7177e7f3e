"""A solver and a tester of programs: the tester writes two test cases for the solver's program.

The solver tries again, with the result of each case, only if the cases are readable and its program failed one of them
and the hidden tests. Each program gets the reward 1 if it passes all hidden tests; the trajectory's reward is that of
the last program. The cases get 0.5 if the reference solution passes them (they are valid), and another 0.5 if they then
agree with the hidden tests about the program.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pydantic import Field

from rillflow.agents.options import filler, read_options
from rillflow.agents.sandbox import SandboxConfig, code_of, shared
from rillflow.agents.workflows.coding import CodeOptions, example_of, feedback, reference_of, written_cases
from rillflow.agents.workflows.multi_policy import checker, is_right, outcome, problem_of, user

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
    """The options of the workflow `solver_tester`."""

    sandbox: SandboxConfig = Field(SandboxConfig(), description="where programs meet the cases that a model wrote")


async def play(episode: Episode) -> dict[str, float]:
    """Play one episode with the roles solver and tester. The payload is one of the reward `code`, with a reference
    solution."""
    options = read_options("options", episode.options, TesterOptions)
    example = example_of(episode.payload)
    fill, check = filler(PROMPTS, options.prompts), checker(episode, options.check)
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
