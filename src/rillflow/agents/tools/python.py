"""`python`: programs that a model writes, each run in a new sandbox. Nothing is kept from one call to the next."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from rillflow.agents.sandbox import Sandbox, SandboxConfig
from rillflow.agents.tools.functions import tool_of
from rillflow.errors import SandboxError

if TYPE_CHECKING:
    from rillflow.agents.sandbox import Result
    from rillflow.contracts import Tool

_ENDS = {
    "exit": "the program ended early",
    "timeout": "the program took too long",
    "output": "the program wrote too much",
    "memory": "the program needed too much memory",
    "killed": "the program was killed",
}


class Python(SandboxConfig):
    """The tool `python`. Its options are those of the sandbox."""

    async def open(self, timeout: float, stack: AsyncExitStack) -> Tool:
        """Open the sandbox and return the tool.

        The program's limit plus the wait for a free sandbox are shorter than the call's timeout. So the output of a
        slow program is still shown, and a busy sandbox is raised as our error and not reported to the model.
        """
        seconds, wait = min(self.seconds, timeout * 0.8), min(self.wait, timeout * 0.15)
        sandbox = Sandbox(SandboxConfig(**self.model_dump() | {"wait": wait}))
        await asyncio.to_thread(sandbox.open)
        stack.callback(sandbox.close)

        async def python(code: str) -> str:
            """Run a Python program and read what it prints and the value of its last expression."""
            latest = time.monotonic() + timeout - wait - seconds
            try:
                result = await sandbox.run(code, seconds=seconds)
            except SandboxError:
                if time.monotonic() > latest:  # not enough time for a second try
                    raise
                result = await sandbox.run(code, seconds=seconds)
            return shown(result)

        return tool_of(python, timeout=timeout)


def shown(result: Result) -> str:
    """Return the output and the last value, as a notebook shows them."""
    parts = [result.stdout.rstrip("\n"), result.value or ""]
    if result.status == "error":
        parts.append(f"error: {result.stderr.strip()}")
    elif result.status != "ok":
        parts.append(f"error: {_ENDS[result.status]}")
    return "\n".join(filter(None, parts)) or "(nothing was printed)"
