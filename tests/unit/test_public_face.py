"""The names of `import rillflow` exist, are documented, and cost nothing until they are used."""

from __future__ import annotations

import ast
import asyncio
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rillflow
from rillflow.agents.tools.functions import tool_of
from scripts.api_page import SECTIONS

HEAVY = ("torch", "transformers", "pydantic", "msgspec", "openai", "numpy", "rich")


def examples(name: str) -> str:
    """Return the example in the docstring of a public name."""
    _, found, example = inspect.cleandoc(getattr(rillflow, name).__doc__).partition("\nExample:\n")
    assert found, f"the docstring of {name} has no example"
    return textwrap.dedent(example)


def test_the_import_loads_no_library() -> None:
    code = f"import sys, rillflow; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_all_names_but_heavy_libraries_are_there() -> None:
    code = (
        "import sys, rillflow\n"
        "for name in rillflow.__all__: getattr(rillflow, name)\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
    assert dir(rillflow) == sorted(rillflow.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'runs'"):
        rillflow.runs  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", sorted({*rillflow.__all__} - {"__version__", "errors"}))
def test_every_name_is_documented_with_an_example(name: str) -> None:
    ast.parse(f"async def example():\n{textwrap.indent(examples(name), '    ')}")
    assert any(name in names for names in SECTIONS.values()), f"{name} is not on the page"


async def test_a_decorated_tool_is_checked_and_stays_a_function() -> None:
    @rillflow.tool(name="add", description="Add two numbers.")
    async def plus(a: int, b: int) -> int:
        return a + b

    made = tool_of(plus)
    assert (made.name, made.description) == ("add", "Add two numbers.")
    assert await made.call({"a": 2, "b": 3}, None) == "5"
    assert await plus(2, 3) == 5
    with pytest.raises(rillflow.ConfigError, match="b has no type"):

        @rillflow.tool
        def minus(a: int, b) -> int:  # type: ignore[no-untyped-def]
            return a


def test_a_decorated_reward_is_checked_and_stays_a_function() -> None:
    @rillflow.reward
    def exact(payload: dict[str, str], answer: str, scale: float = 1.0) -> float:
        return scale * float(answer == payload["answer"])

    assert exact({"answer": "4"}, "4") == 1.0
    with pytest.raises(rillflow.ConfigError, match="'judge' names nothing"):

        @rillflow.reward
        def wrong(payload: dict[str, str], answer: str, judge: str) -> float:
            return 0.0


def test_overrides_go_with_a_name(tmp_path: Path) -> None:
    with pytest.raises(rillflow.ConfigError, match="overrides need a recipe's name"):
        rillflow.run(rillflow.load_recipe("quickstart"), "seed=1", runs=tmp_path)


def test_a_wrong_recipe_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(rillflow.ConfigError, match=r"unknown key policies\.agent\.trainer\.step\b"):
        rillflow.run("quickstart", "trainer.step=3", runs=tmp_path)
    assert not list(tmp_path.iterdir())


async def test_run_refuses_to_block_an_event_loop(tmp_path: Path) -> None:
    with pytest.raises(rillflow.RunError, match="event loop"):
        rillflow.run("quickstart", runs=tmp_path)
    with pytest.raises(rillflow.RunError, match="event loop"):
        rillflow.resume(tmp_path)
    with pytest.raises(rillflow.ConfigError):
        await asyncio.to_thread(rillflow.run, "no_such_recipe", runs=tmp_path)


def test_only_a_run_folder_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(rillflow.RunError, match="run folder"):
        rillflow.resume(tmp_path)
