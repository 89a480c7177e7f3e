"""The reference solutions of public code sets pass through the sandbox, by the way the reward goes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rillflow.agents.rewards import code as reward
from rillflow.agents.sandbox import Sandbox, Verdict
from rillflow.dataflow.sources.benchmarks import data_folder
from soak import repetitions

pytestmark = pytest.mark.needs("data")

_NEVER = "amicable_numbers_sum"  # takes longer than anybody waits


def _rows(name: str) -> list[dict[str, Any]]:
    path = data_folder() / "code" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _graded(sandbox: Sandbox, work: list[tuple[dict[str, Any], str, float]]) -> list[Verdict]:
    async def all_of_them() -> list[Verdict]:
        return await asyncio.gather(
            *(
                sandbox.grade(reward.candidate_of(row, code), reward.tests_of(row), seconds=limit)
                for row, code, limit in work
            )
        )

    return asyncio.run(all_of_them())


@pytest.mark.soak
def test_humaneval(sandbox: Sandbox) -> None:
    rows = _rows("humaneval")[: repetitions(60, 164)]
    verdicts = _graded(sandbox, [(row, row["canonical_solution"], 60) for row in rows])
    assert [row["entry_point"] for row, verdict in zip(rows, verdicts, strict=True) if not verdict.ok] == []
    assert len(verdicts) == repetitions(60, 164)


def test_humaneval_in_whole_functions_and_fences(sandbox: Sandbox) -> None:
    rows = _rows("humaneval")[30:40]  # among them one whose tests need a function that the prompt gives
    answers = [f"Here:\n```python\n{row['prompt']}{row['canonical_solution']}\n```\nDone." for row in rows]
    assert all(verdict.ok for verdict in _graded(sandbox, [(*pair, 60) for pair in zip(rows, answers, strict=True)]))
    empty = [f"```python\ndef {row['entry_point']}(*given):\n    return None\n```" for row in rows]
    assert not any(verdict.ok for verdict in _graded(sandbox, [(*pair, 60) for pair in zip(rows, empty, strict=True)]))


@pytest.mark.soak
def test_the_first_of_mbpp(sandbox: Sandbox) -> None:
    rows = _rows("mbpp")[: repetitions(80, 200)]
    work = [(row, row["code"], 2.0 if _NEVER in row["code"] else 60.0) for row in rows]
    failed = [row["task_id"] for row, one in zip(rows, _graded(sandbox, work), strict=True) if not one.ok]
    assert len(failed) <= 1


def test_mbpp_with_objects_that_the_candidate_makes(sandbox: Sandbox) -> None:
    rows = [row for row in _rows("mbpp") if row["test_setup_code"] or "Pair(" in str(row["test_list"])]
    assert rows
    assert all(verdict.ok for verdict in _graded(sandbox, [(row, row["code"], 60) for row in rows]))
