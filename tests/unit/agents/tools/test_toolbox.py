"""Every call of a model is answered with text; only our own faults are raised."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.agents.tools.functions import tool_of
from rillflow.agents.tools.toolbox import MAX_ARGUMENTS, MAX_OUTPUT, OpenToolbox, check_tools, open_toolbox
from rillflow.config import ToolConfig
from rillflow.config.tracebacks import UserErrors
from rillflow.errors import ConfigError, EnvironmentLost, SandboxError, ToolError
from soak import repetitions


async def echo(text: str, times: int = 1) -> str:
    """Say it again."""
    return text * times


BOX = OpenToolbox([tool_of(echo)])


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("echo", '{"text": "a", "times": 2}', "aa"),
        ("nothing", "{}", "error: there is no tool nothing; there are: echo"),
        ("echo", "{", "error: the arguments are not JSON"),
        ("echo", "[" * 100_000, "error: the arguments are longer"),
        ("echo", "[" * 60_000, "error: the arguments are not JSON"),
        ("echo", "[1]", "error: the arguments are not an object"),
        ("echo", "{}", "error: text: missing; the arguments are: text, times"),
        ("echo", '{"text": "a", "loud": true}', "error: loud: unknown; the arguments are: text, times"),
        ("echo", '{"text": {"a": 1}}', "error: text: Input should be a valid string"),
    ],
)
async def test_what_a_model_may_write(name: str, arguments: str, said: str) -> None:
    assert (await BOX.call(name, arguments)).startswith(said)


@settings(max_examples=repetitions(60, 200), deadline=None)
@given(name=st.text(max_size=20) | st.just("echo"), arguments=st.text(max_size=200))
def test_no_text_makes_a_call_raise(name: str, arguments: str) -> None:
    said = asyncio.run(BOX.call(name, arguments))
    assert said.startswith("error: ")
    said.encode()


@settings(max_examples=repetitions(60, 200), deadline=None)
@given(st.dictionaries(st.sampled_from(["text", "times", "x"]), st.text() | st.integers() | st.none() | st.floats()))
def test_no_arguments_make_a_call_raise(arguments: dict[str, Any]) -> None:
    if isinstance(times := arguments.get("times"), int):
        arguments["times"] = times % 10
    asyncio.run(BOX.call("echo", arguments)).encode()


async def test_what_a_tool_raises_is_told_unless_it_is_ours() -> None:
    async def broken(how: str) -> str:
        """Break."""
        if how == "told":
            raise ToolError("not like this", "a hint for users")
        if how == "bug":
            raise ValueError("oh")
        if how == "sandbox":
            raise SandboxError("gone")
        raise EnvironmentLost("gone")

    box = OpenToolbox([tool_of(broken)])
    assert await box.call("broken", {"how": "told"}) == "error: not like this"
    assert await box.call("broken", {"how": "bug"}) == "error: ValueError: oh"
    with pytest.raises(SandboxError):
        await box.call("broken", {"how": "sandbox"})
    with pytest.raises(EnvironmentLost):
        await box.call("broken", {"how": "server"})


async def test_deadlines_are_the_tools_and_the_episodes() -> None:
    async def wait() -> str:
        """Wait."""
        await asyncio.Event().wait()
        return ""

    episode: Any = SimpleNamespace(payload={}, seconds_left=lambda: 0.02)
    assert await OpenToolbox([tool_of(wait, timeout=0.01)]).call("wait", {}) == "error: wait took longer than 0.01 s"
    assert await OpenToolbox([tool_of(wait)]).call("wait", {}, episode) == "error: wait took longer than 0.02 s"


async def test_a_tool_at_its_deadline_is_counted_with_where_it_waited() -> None:
    async def wait() -> str:
        """Wait."""
        await asyncio.Event().wait()
        return ""

    errors = UserErrors()
    box = OpenToolbox([tool_of(wait, timeout=0.5)], errors=errors)
    for _ in range(2):
        await box.call("wait", {})
    (noted,) = errors.take()
    assert (noted.kind, noted.count) == ("slow tool wait", 2)
    assert noted.where.startswith("test_toolbox.py:")
    assert noted.error.startswith("wait took longer than 0.5 s (test_toolbox.py:")


async def test_output_is_bounded_and_can_be_sent_on() -> None:
    said = await BOX.call("echo", {"text": "x", "times": MAX_OUTPUT + 5})
    assert said == "x" * MAX_OUTPUT + "\n… (5 characters more)"
    own = OpenToolbox([tool_of(echo)], outputs={"echo": 64})
    assert (await own.call("echo", {"text": "x" * 100})).startswith("x" * 64 + "\n…")
    assert await BOX.call("echo", {"text": "a\ud800b"}) in {"a?b", "error: text: Input should be a valid string"}
    assert len(await BOX.call("x" * MAX_ARGUMENTS, {})) < 300


def test_names() -> None:
    with pytest.raises(ConfigError, match="two of them have the name echo"):
        OpenToolbox([tool_of(echo), tool_of(echo)])
    with pytest.raises(ConfigError, match="is not a valid name"):
        OpenToolbox([tool_of(echo, name="say it")])


async def test_the_tools_of_a_recipe() -> None:
    configs = [
        ToolConfig(name="calculator"),
        ToolConfig(function=f"{__name__}:echo", timeout=3, output=100),
    ]
    check_tools(configs)
    box = await open_toolbox(configs)
    try:
        assert box.names() == ["calculator", "echo"]
        assert [schema["function"]["name"] for schema in box.schemas] == ["calculator", "echo"]
        assert await box.call("calculator", {"expression": "6 * 7"}) == "42"
        assert len(await box.call("echo", {"text": "x" * 1000})) < 200
    finally:
        await box.close()


@pytest.mark.parametrize(
    ("config", "why", "hint"),
    [
        ({"name": "calculater"}, "no tool 'calculater'", "did you mean 'calculator'"),
        ({"name": "search"}, "corpus is missing", "its options are: corpus"),
        ({"name": "calculator", "options": {"depth": 3}}, "depth", "its options are: none"),
        ({"function": "rillflow.agents.tools.calculator:nothing"}, "has no 'nothing'", "check the recipe"),
    ],
)
def test_what_a_look_can_find(config: dict[str, Any], why: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_tools([ToolConfig(**config)])
    assert why in raised.value.message
    assert hint in raised.value.hint


async def test_what_was_opened_is_closed_when_another_cannot_be() -> None:
    with pytest.raises(ConfigError, match="no tool 'nothing'"):
        await open_toolbox([ToolConfig(name="calculator"), ToolConfig(name="nothing")])
