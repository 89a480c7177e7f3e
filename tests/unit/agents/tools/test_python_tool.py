"""Python that a model writes, in a real sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rillflow.agents.sandbox import Result, Sandbox
from rillflow.agents.tools.toolbox import open_toolbox
from rillflow.config import ToolConfig
from rillflow.errors import ConfigError, SandboxError


@pytest.mark.needs("bubblewrap")
async def test_what_a_model_reads_of_its_program() -> None:
    box = await open_toolbox([ToolConfig(name="python", options={"pool": 2, "seconds": 60, "memory": 256}, timeout=90)])
    try:
        assert await box.call("python", {"code": "print('one')\n6 * 7"}) == "one\n42"
        assert await box.call("python", {"code": "x = 1"}) == "(nothing was printed)"
        # Nothing is kept from one call to the next.
        assert "NameError" in await box.call("python", {"code": "print(x)"})
        said = await box.call("python", {"code": "print('before')\n1 / 0"})
        assert said.startswith("before\nerror: ")
        assert "ZeroDivisionError" in said
        assert await box.call("python", {"code": "import os; os._exit(0)"}) == "error: the program ended early"
        assert "too much memory" in await box.call("python", {"code": "'a' * 10**10"})
    finally:
        await box.close()


@pytest.mark.needs("bubblewrap")
async def test_a_program_ends_before_the_calls_deadline() -> None:
    box = await open_toolbox([ToolConfig(name="python", options={"pool": 1}, timeout=2.0)])
    try:
        said = await box.call("python", {"code": "print('here', flush=True)\nwhile True: pass"})
        assert said in {"here\nerror: the program took too long", "error: python took longer than 2 s"}
    finally:
        await box.close()


@pytest.mark.needs("bubblewrap")
async def test_a_sandbox_that_failed_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    failures, run = [SandboxError("gone")], Sandbox.run

    async def failing(self: Sandbox, code: str, **options: Any) -> Result:
        if failures:
            raise failures.pop()
        return await run(self, code, **options)

    monkeypatch.setattr(Sandbox, "run", failing)
    box = await open_toolbox([ToolConfig(name="python", options={"pool": 1}, timeout=60)])
    try:
        assert await box.call("python", {"code": "6 * 7"}) == "42"
        failures += [SandboxError("gone"), SandboxError("gone")]
        with pytest.raises(SandboxError, match="gone"):
            await box.call("python", {"code": "6 * 7"})
    finally:
        await box.close()


@pytest.mark.needs("bubblewrap")
async def test_a_busy_sandbox_is_not_told_to_the_model() -> None:
    box = await open_toolbox([ToolConfig(name="python", options={"pool": 1, "running": 1}, timeout=4.0)])
    try:
        both = (box.call("python", {"code": "import time\ntime.sleep(100)"}) for _ in range(2))
        said, raised = sorted(
            await asyncio.gather(*both, return_exceptions=True), key=lambda one: not isinstance(one, str)
        )
        assert said in {"error: the program took too long", "error: python took longer than 4 s"}
        assert isinstance(raised, SandboxError)
        assert "no turn" in raised.message
    finally:
        await box.close()


@pytest.mark.parametrize("options", [{"isolation": "none"}, {"network": True}])
async def test_options_of_the_sandbox_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        await open_toolbox([ToolConfig(name="python", options=options)])
