"""Python that a model writes, in a real sandbox."""

from __future__ import annotations

import pytest

from rillflow.agents.tools.toolbox import open_toolbox
from rillflow.config import ToolConfig
from rillflow.errors import ConfigError
from sandboxed import need_sandbox


@pytest.fixture
def sandbox() -> None:
    need_sandbox()


@pytest.mark.usefixtures("sandbox")
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


@pytest.mark.usefixtures("sandbox")
async def test_a_program_ends_before_the_calls_deadline() -> None:
    box = await open_toolbox([ToolConfig(name="python", options={"pool": 1}, timeout=2.0)])
    try:
        said = await box.call("python", {"code": "print('here', flush=True)\nwhile True: pass"})
        assert said in {"here\nerror: the program took too long", "error: python took longer than 2 s"}
    finally:
        await box.close()


@pytest.mark.parametrize("options", [{"isolation": "none"}, {"network": True}])
async def test_options_of_the_sandbox_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        await open_toolbox([ToolConfig(name="python", options=options)])
