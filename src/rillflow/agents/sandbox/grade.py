"""Grading: the verdict is made from what the judge says, never from what the candidate says or how it ends.

The candidate's process gets calls and returns values. The judge's process has the tests and a nonce; between the two
there is one line for plain values, and the verdict comes by a channel that the candidate does not have. A candidate
that leaves, hangs or writes too much fails the tests that were not passed before. A judge that gives no verdict is the
sandbox's failure, not the candidate's.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from typing import Any

from rillflow.agents.sandbox.box import Box, Left
from rillflow.agents.sandbox.inside.judge import GONE
from rillflow.agents.sandbox.pool import Pool
from rillflow.agents.sandbox.program import run_program
from rillflow.agents.sandbox.results import Verdict
from rillflow.agents.sandbox.tests import Asserts, Cases, Check, Pairs, Tests
from rillflow.errors import SandboxError

_SIGXCPU = -24


async def grade(pool: Pool, code: str, tests: Tests, seconds: float) -> Verdict:
    """Which of the tests the code passes within so many seconds of wall time."""
    started = time.monotonic()
    if isinstance(tests, Pairs):
        cases, cause = await _grade_pairs(pool, code, tests, seconds)
    else:
        task = _task(tests)
        async with pool.boxes(2) as (candidate, judge):
            judge.keep_output = False
            grading = _Grading(candidate, judge, total=len(task["cases"]) if "cases" in task else len(task["tests"]))
            cases, cause = await grading.verdict(code, task, seconds)
    return Verdict(tuple(cases), cause if not all(cases) else "", time.monotonic() - started)


def _task(tests: Asserts | Check | Cases) -> dict[str, Any]:
    """The judge's task, less the nonce."""
    if isinstance(tests, Cases):
        return {"kind": "cases", "cases": [case.plain() for case in tests.cases]}
    if isinstance(tests, Check):
        return {
            "kind": "check",
            "given": tests.setup,
            "setup": "",
            "tests": [tests.test],
            "entry_point": tests.entry_point,
        }
    return {"kind": "asserts", "given": "", "setup": tests.setup, "tests": list(tests.tests), "entry_point": ""}


class _Grading:
    def __init__(self, candidate: Box, judge: Box, total: int) -> None:
        self._candidate = candidate
        self._judge = judge
        self._nonce = secrets.token_hex(16)
        self._cases = [False] * total
        self._cause = ""

    async def verdict(self, code: str, task: dict[str, Any], seconds: float) -> tuple[list[bool], str]:
        try:
            async with asyncio.timeout(seconds):
                if await self._begin(code, task, seconds):
                    await self._hear_results()
        except TimeoutError:
            self._cause = self._cause or f"timeout: not done within {seconds:g} seconds"
        return self._cases, self._cause

    async def _begin(self, code: str, task: dict[str, Any], seconds: float) -> bool:
        """Set both to work with a line between them, and let the candidate's code run once; whatever goes wrong with
        it fails all tests."""
        ends = socket.socketpair()
        try:
            try:
                await self._judge.task("judge", seconds, ends[0], nonce=self._nonce, **task)
            except Left:
                raise SandboxError("the judge's process has gone", "the grading can be repeated") from None
            await self._candidate.task("candidate", seconds, ends[1], code=code)
        except Left:
            self._cause = await self._why_gone()
            return False
        finally:
            for end in ends:
                end.close()
        try:
            said = await self._candidate.hear()
            self._cause = "" if said == {"defined": True} else _cause_of(said)
        except Left:
            self._cause = await self._why_gone()
        return not self._cause

    async def _hear_results(self) -> None:
        try:
            for index in range(len(self._cases)):
                await self._record(index, await self._judge.hear())
        except Left:
            raise SandboxError(
                "the tests ended their own process: there is no verdict", "look at the tests: do they exit?"
            ) from None

    async def _record(self, index: int, result: Any) -> None:
        nonce, reported, fault = result
        if nonce != self._nonce or reported != index:
            raise SandboxError("the judge's process broke its protocol", "the grading can be repeated")
        self._cases[index] = not fault
        if fault and not self._cause:
            self._cause = await self._why_gone() if fault == GONE else f"test {index + 1}: {fault}"

    async def _why_gone(self) -> str:
        code = await self._candidate.end()
        if self._candidate.overflowed:
            return "output: the candidate wrote too much"
        if code == _SIGXCPU:
            return "timeout: no processor time left"
        return f"the candidate left before its time (exit code {code})"


def _cause_of(said: Any) -> str:
    """Why the candidate's code did not run, in its own words where it has some; never empty."""
    return said[:500] if isinstance(said, str) and said else "the candidate said something that is no answer"


async def _grade_pairs(pool: Pool, code: str, tests: Pairs, seconds: float) -> tuple[list[bool], str]:
    """Each input in a sandbox of its own; the outputs are compared here, as text. The seconds are those that the
    program itself takes for all of them: waiting for turns that others have is not its doing."""
    left, cases, cause = seconds, [], ""
    for index, (given, wanted) in enumerate(tests.pairs):
        fault = f"timeout: not done within {seconds:g} seconds"
        if left > 0:
            result = await run_program(pool, code, given, left, {})
            left -= result.seconds
            finished = result.status == "ok" or (result.status == "exit" and result.code == 0)
            same = _lines(result.stdout) == _lines(wanted)
            fault = "" if finished and same else "another output" if finished else result.status
        cases.append(not fault)
        cause = cause or (fault and f"test {index + 1}: {fault}")
    return cases, cause


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
