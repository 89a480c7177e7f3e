"""Ready sandboxes, and what runs in them: a whole program, or the grading of a candidate against tests.

A sandbox is used once; for each that is taken, another is made in the background. At most `pool` sandboxes are ready
and `running` runs go on at once; a run waits for its turn with a deadline. If the first process died, the next run
starts it again. This is not the pool of worker processes (`agents.processes`): those are used again and again, these
are forked from one process and never serve a second run.

The verdict of a grading comes from the judge, never from the candidate or from how the candidate ends. The process of
the candidate gets calls and returns values. The process of the judge has the tests and a nonce. One line between the
two carries plain values; the verdict comes by a channel that the candidate does not have. A candidate that exits, hangs
or writes too much fails the tests that it had not passed before. A judge without a verdict is a failure of the sandbox
and not of the candidate.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from typing import Any

from rillflow.agents.sandbox.box import Box, Cell, Left
from rillflow.agents.sandbox.inside.judge import GONE
from rillflow.agents.sandbox.interface import (
    Asserts,
    Cases,
    Check,
    Pairs,
    Result,
    SandboxConfig,
    Status,
    Tests,
    Verdict,
)
from rillflow.errors import SandboxError

_CLOSED = "the sandbox is closed"


class Pool:
    """The pool of one event loop, whose thread must live as long as the pool."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self._cell = Cell(config)
        self._ready: deque[Box] = deque()
        self._used: set[Box] = set()
        self._turns = asyncio.Semaphore(config.running)
        self._filling: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self._fill()

    @asynccontextmanager
    async def boxes(self, count: int) -> AsyncIterator[list[Box]]:
        """Yield `count` fresh sandboxes for one run or one grading; they are ended afterwards."""
        try:
            async with asyncio.timeout(self.config.wait):
                await self._turns.acquire()
        except TimeoutError:
            raise SandboxError(
                f"no turn in the sandbox within {self.config.wait:g} seconds",
                "raise `running`, or ask for less at once",
            ) from None
        taken: list[Box] = []
        try:
            while len(taken) < count:
                taken.append(await self._take())
                self._used.add(taken[-1])
            yield taken
        finally:
            # The caller does not wait until the sandboxes have ended; the next turn does.
            task = asyncio.create_task(self._throw_away(taken))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _throw_away(self, boxes: list[Box]) -> None:
        try:
            for box in boxes:
                box.kill()
            await asyncio.gather(*(box.dispose() for box in boxes), return_exceptions=True)
        finally:
            self._used.difference_update(boxes)
            self._turns.release()
            self._fill()

    async def close(self) -> None:
        """End all sandboxes; runs that are under way fail."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        while self._ready:
            self._ready.pop().abandon()
        for box in self._used:
            box.kill()
        self._cell.close()

    async def _take(self) -> Box:
        while self._ready:
            box = self._ready.popleft()
            if box.fresh:
                return box
            box.abandon()
        return await self._make()

    async def _make(self) -> Box:
        if self._closed:
            raise SandboxError(_CLOSED)
        if not self._cell.alive:
            self._cell.close()
            self._cell = Cell(self.config)
        box = Box(self._cell, self.config.output)
        try:
            await box.up()
            if self._closed:
                raise SandboxError(_CLOSED)
        except BaseException:
            box.abandon()
            raise
        return box

    def _fill(self) -> None:
        if self._closed:
            return
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._refill())

    async def _refill(self) -> None:
        while len(self._ready) < self.config.pool:
            try:
                self._ready.append(await self._make())
            except SandboxError:
                return  # the next run meets the same error and raises it


# ---------------------------------------------------------------- one run, one grading

_SAID: dict[str, Status] = {"ok": "ok", "error": "error", "exit": "exit", "memory": "memory"}
_SIGXCPU = -24


async def run_program(pool: Pool, code: str, stdin: str, seconds: float, files: Mapping[str, str]) -> Result:
    """Return what the program wrote and how it ended."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise SandboxError(f"{name!r} is not a valid file name in a sandbox", "give paths relative to its folder")
    async with pool.boxes(1) as (box,):
        started = time.monotonic()
        said: object = None
        late = False
        try:
            async with asyncio.timeout(seconds):
                await box.task("program", seconds, code=code, stdin=stdin, files=dict(files))
                said = await box.hear()
        except TimeoutError:
            late = True
        except Left:
            pass  # it closed or misused its channel; its end is observed from outside
        left = 0.0 if late else max(seconds - (time.monotonic() - started), 0.001)
        ended = await _end(box, left)
        taken = time.monotonic() - started
        stdout, stderr = box.texts()
        status = "timeout" if late or ended is None else _status(box, said, ended)
        value = said.get("value") if status == "ok" and isinstance(said, dict) else None
        code_ = await box.end()
        return Result(stdout, stderr, value if isinstance(value, str) else None, status, code_, taken)


async def _end(box: Box, within: float) -> int | None:
    """Return the exit code, or None if the program had to be killed (threads or exit handlers did not stop)."""
    waiting = asyncio.ensure_future(box.end(within))
    done, _ = await asyncio.wait([waiting], timeout=within)
    if done:
        return waiting.result()
    box.kill()
    await waiting
    return None


def _status(box: Box, said: object, code: int) -> Status:
    if box.overflowed:
        return "output"
    word = said.get("status") if isinstance(said, dict) else None  # the code inside may have sent anything
    if isinstance(word, str) and word in _SAID and code >= 0:
        return _SAID[word]
    if code == _SIGXCPU:
        return "timeout"
    return "killed" if code < 0 else "exit"


async def grade(pool: Pool, code: str, tests: Tests, seconds: float) -> Verdict:
    """Return which tests the code passes within `seconds` of wall time."""
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
    """Return the judge's task without the nonce."""
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
        """Start both with a line between them and run the candidate's code once; return whether that worked."""
        ends = socket.socketpair()
        try:
            try:
                await self._judge.task("judge", seconds, ends[0], nonce=self._nonce, **task)
            except Left:
                raise SandboxError("the judge's process is gone", "the grading can be repeated") from None
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
                "the tests ended their own process: there is no verdict", "check whether the tests exit"
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
        return f"the candidate exited too early (exit code {code})"


def _cause_of(said: Any) -> str:
    """Return why the candidate's code did not run, in its own words if it gave any; never empty."""
    return said[:500] if isinstance(said, str) and said else "the candidate sent something that is not an answer"


async def _grade_pairs(pool: Pool, code: str, tests: Pairs, seconds: float) -> tuple[list[bool], str]:
    """Run the program once for each input, each time in a new sandbox, and compare its output here as text.

    `seconds` bounds the time of all runs together, without the time that they wait for a free sandbox.
    """
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
