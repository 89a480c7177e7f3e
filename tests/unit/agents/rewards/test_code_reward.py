"""The reward for programs: all tests or a share of them; 0 for what the program does; no reward for what we do."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.agents.rewards.code import Code, candidate_of
from rillflow.agents.rewards.registry import make_reward
from rillflow.agents.sandbox import close_shared, code_of, literal_cases
from rillflow.agents.sandbox.inside.values import pack
from rillflow.agents.sandbox.interface import Case
from rillflow.agents.sandbox.running import _task
from rillflow.errors import RewardError
from soak import repetitions

LIST = {"test_list": ["assert double(3) == 6", "assert double(N) == 8"], "test_setup_code": "N = 4"}
CHECK = {
    "prompt": "from math import floor\n\n\ndef half(x):\n    return x / 2\n\n\ndef low(x):\n    '''Half of it.'''\n",
    "test": "def check(candidate):\n    assert candidate(5) == 2\n    assert half(5) == 2.5\n",
    "entry_point": "low",
}
ZERO = {  # as HumanEval/32: the test uses a function that the prompt gives; and the prompt breaks off within a block
    "prompt": "def at(power, x):\n    return x**power - power**power\n\n\ndef zero(power):\n    if power > 0:\n    ",
    "test": "def check(candidate):\n    for power in (2, 3):\n        assert at(power, candidate(power)) == 0\n",
    "entry_point": "zero",
}
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
ADDS = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_shared()


def score(payload: dict[str, Any], answer: Any, **options: Any) -> float:
    async def scored() -> float:
        return float(await make_reward("code", **options)(payload, answer))

    return asyncio.run(scored())


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(
    ("payload", "answer", "all_of_them", "share"),
    [
        (LIST, "So:\n```python\ndef double(x):\n    return 2 * x\n```\nThat is it.", 1, 1),
        (LIST, "def double(x):\n    return 6", 0, 0.5),
        (LIST, "```py\ndef double(x):\n    return 1\n```\nno:\n```python\ndef double(x): return x + x", 1, 1),
        (LIST, "I cannot.", 0, 0),
        (LIST, None, 0, 0),
        (LIST, "x" * (1 << 19), 0, 0),
        (CHECK, "    return floor(half(x))\n", 1, 1),
        (CHECK, "```python\ndef low(x):\n    return floor(half(x))\n```", 1, 1),
        (CHECK, "```python\ndef low(x):\n    return 3\n```", 0, 0),
        (CHECK, "```python\ndef half(x):\n    return 2.5\ndef low(x):\n    return floor(x / 2)\n```", 1, 1),
        (ZERO, "    return 2 if power == 2 else 3\n", 1, 1),
        (ZERO, "    return 0\ndef at(power, x):\n    return 0\n", 0, 0),
        (ZERO, "```python\ndef at(power, x):\n    return 0\ndef zero(power):\n    return 1\n```", 0, 0),
        (PAIRS, ADDS, 1, 1),
        (PAIRS, "print(3)", 0, 0.5),
    ],
)
def test_what_passes_its_tests_is_rewarded(
    payload: dict[str, Any], answer: Any, all_of_them: float, share: float
) -> None:
    assert score(payload, answer) == all_of_them
    assert score(payload, answer, partial=True) == share


@pytest.mark.parametrize("payload", [{}, {"test": "x"}, {"inputs": ["1"], "outputs": []}, {"test_list": []}])
def test_a_prompt_without_tests_gives_no_reward(payload: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="no tests"):
        score(payload, "x")


@pytest.mark.needs("bubblewrap")
def test_tests_that_cannot_be_run_give_no_reward() -> None:
    with pytest.raises(RewardError, match="no verdict"):
        score({"test_list": ["import os; os._exit(0)"]}, "x = 1")


def test_without_a_sandbox_there_is_no_reward_and_no_weaker_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    close_shared()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RewardError, match="bubblewrap"):
        score(LIST, "def double(x): return 2 * x")
    assert score(LIST, "def double(x): return 2 * x", isolation="process") == 1


@pytest.mark.needs("bubblewrap")
def test_the_pool_stands_before_the_first_answer() -> None:
    asyncio.run(Code().prepare())


def test_how_many_are_graded_at_one_time_can_be_set() -> None:
    assert Code(running=3)._sandbox().running == 3
    assert Code()._sandbox().running >= 4


def test_an_answer_without_the_function_goes_on_where_the_prompt_ends() -> None:
    assert candidate_of(CHECK, "    return 1") == CHECK["prompt"] + "    return 1"
    assert candidate_of({"prompt": "Write it."}, "x = 1") == "x = 1"


def test_tests_that_a_model_wrote_become_values_or_nothing() -> None:
    text = "Tests:\nassert f(1, [2], x='a') == {'b': (3,)}\nassert f(open('x')) == 1\n"
    text += "assert f(1) is None\nassert g(-1) == -2.5\n"
    cases = literal_cases(
        text + "import os; os._exit(0)\nassert f(*[1]) == 1\nassert f(**{}) == 1\nassert f(" + "(" * 3000
    )
    assert cases.cases == (
        Case("f", (1, [2]), {"b": (3,)}, {"x": "a"}),
        Case("g", (-1,), -2.5),
    )


def test_literals_that_cannot_be_sent_are_no_cases() -> None:
    deep = [f"assert f({'[' * depth}{']' * depth}) == 1" for depth in range(1, 150)]
    cases = literal_cases("\n".join(["assert f(...) == 1", "assert f(x={1: ...}) == 1", "assert f(1) == ...", *deep]))
    assert 90 < len(cases.cases) < 100
    pack({"task": "judge", "seconds": 1.0, **_task(cases)})


_OLD = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


@settings(max_examples=repetitions(100, 500), deadline=None)
@given(st.lists(st.sampled_from(["`", "```", "\n", " ", "\t", "python", "py", "C", "x = 1", "é"]), max_size=12))
def test_the_program_of_an_answer_is_what_the_pattern_found(parts: list[str]) -> None:
    text = "".join(parts)
    blocks = _OLD.findall(text)
    python = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    assert code_of(text) == (python or [body for _, body in blocks] or [text])[-1]


@pytest.mark.parametrize("text", ["```" + " " * 200_000, "```" * 100_000, "```\n" * 100_000, "```x" * 100_000])
def test_finding_the_program_takes_no_longer_than_reading(text: str) -> None:
    started = time.process_time()
    code_of(text)
    assert time.process_time() - started < 2
