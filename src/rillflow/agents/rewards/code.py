"""The reward `code`: whether a program passes its tests.

Invariant: the tests run where the program cannot reach them (`docs/sandbox.md`). A program that fails in any way earns
0; a sandbox that fails, or a prompt without tests, is a RewardError.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rillflow.agents.rewards.base import ShippedReward, text_of
from rillflow.agents.sandbox import Asserts, Check, Pairs, SandboxConfig, Tests, code_of, shared
from rillflow.config.base import Positive, Seconds
from rillflow.errors import RewardError, SandboxError

_LONGEST = 1 << 18  # characters of a program
_ATTEMPTS = 2  # a sandbox that failed is started again
_RUNNING = max(4, os.cpu_count() or 4)


class Code(ShippedReward):
    """1 if the answer's program passes the prompt's tests (MBPP's, HumanEval's, or inputs and outputs), else 0."""

    partial: bool = Field(False, description="the share of the tests that pass, instead of all or nothing")
    seconds: Seconds = Field(10.0, description="wall time of all tests together; what takes longer fails")
    isolation: Literal["bubblewrap", "process"] = Field(
        "bubblewrap", description="`process` is weaker, only for code that you would run by hand"
    )
    packages: tuple[str, ...] = Field((), description="packages that programs may import: numpy, …")
    running: Positive = Field(_RUNNING, description="gradings at one time; others wait")

    async def prepare(self) -> None:
        """Start the sandboxes before the first answer; an error appears now if that is not possible."""
        await asyncio.to_thread(shared, self._sandbox())

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        tests = tests_of(payload)
        said = text_of(answer)
        if not said.strip() or len(said) > _LONGEST:
            return 0.0
        candidate = candidate_of(payload, said)
        for attempt in range(_ATTEMPTS):
            try:
                sandbox = await asyncio.to_thread(shared, self._sandbox())
                verdict = await sandbox.grade(candidate, tests, seconds=self.seconds)
                break
            except SandboxError as error:
                if attempt + 1 == _ATTEMPTS:
                    raise RewardError(f"no verdict on the program: {error.message}", error.hint) from error
        return verdict.passed / verdict.total if self.partial else float(verdict.ok)

    def _sandbox(self) -> SandboxConfig:
        return SandboxConfig(isolation=self.isolation, packages=self.packages, running=self.running)


def tests_of(payload: Mapping[str, Any]) -> Tests:
    """Return the tests of a prompt, in one of the formats of the public datasets."""
    if payload.get("test_list"):
        setup = [*payload.get("test_imports", ()), payload.get("test_setup_code") or ""]
        return Asserts(tuple(map(str, payload["test_list"])), "\n".join(map(str, setup)).strip())
    if payload.get("test") and payload.get("entry_point"):
        name = str(payload["entry_point"])
        return Check(str(payload["test"]), name, _given(payload.get("prompt"), name))
    inputs, outputs = payload.get("inputs"), payload.get("outputs")
    if isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs):
        return Pairs(tuple((str(given), str(wanted)) for given, wanted in zip(inputs, outputs, strict=True)))
    raise RewardError(
        "the prompt has no tests",
        "its payload needs `test_list`, or `test` and `entry_point`, or `inputs` and `outputs` of the same length",
    )


def _given(prompt: Any, name: str) -> str:
    """Return the prompt's code before the wanted function, with that function as a stub.

    The prompt may end anywhere within the function. Tests use these helpers instead of the candidate's.
    """
    begun = _definition(prompt, name) if isinstance(prompt, str) else None
    return f"{prompt[: begun.end()]}(): pass\n" if begun else ""


def candidate_of(payload: Mapping[str, Any], answer: str) -> str:
    """Return the program of an answer, after the prompt's own code if it has some (imports, given functions).

    An answer that does not define the wanted function continues the prompt's.
    """
    code = code_of(answer)
    prompt, name = payload.get("prompt"), payload.get("entry_point")
    if not isinstance(prompt, str) or not isinstance(name, str) or not _definition(prompt, name):
        return code
    return f"{prompt}\n    pass\n\n{code}" if _definition(code, name) else prompt + code


def _definition(code: str, name: str) -> re.Match[str] | None:
    """Find a definition by text search: a model's code is not parsed in this process."""
    return re.search(rf"^(async +def|def|class) +{re.escape(name)}\b", code, re.MULTILINE)
