"""A typed function is a tool: its types are the schema, and what a model writes is checked against them."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from rillflow.agents.tools.functions import THREADS, tool_of
from rillflow.agents.tools.toolbox import OpenToolbox
from rillflow.errors import ConfigError
from rillflow.examples import stockroom


class Place(BaseModel):
    row: int
    title: str = "none"


def book(
    name: str,
    seats: Annotated[int, Field(ge=1, le=4, description="how many")],
    kind: Literal["aisle", "window"] = "aisle",
    place: Place | None = None,
) -> dict[str, Any]:
    """Book seats.

    They are kept for an hour.

    Args:
        name: who sits there
        kind (str): where

    Returns:
        name: not an argument
    """
    return {"name": name, "seats": seats, "kind": kind, "row": place and place.row}


async def count(box: str, item: str, episode: Any) -> str:
    """Count the pieces of one item in one box."""
    return stockroom.count(episode.payload, {"box": box, "item": item})


def test_the_schema_is_that_of_the_types_and_the_docstring() -> None:
    tool = tool_of(book)
    assert (tool.name, tool.description) == ("book", "Book seats. They are kept for an hour.")
    properties = tool.parameters["properties"]
    assert properties["name"] == {"type": "string", "description": "who sits there"}
    assert properties["seats"] == {"type": "integer", "description": "how many", "minimum": 1, "maximum": 4}
    assert properties["kind"]["enum"] == ["aisle", "window"]
    assert properties["kind"]["description"] == "where"
    assert tool.parameters["required"] == ["name", "seats"]
    # Titles of pydantic's are left out, a property of that name is not.
    assert tool.parameters["$defs"]["Place"]["properties"]["title"] == {"type": "string", "default": "none"}


def test_the_episode_is_not_shown() -> None:
    assert OpenToolbox([tool_of(count)]).schemas == stockroom.TOOLS


async def test_the_episode_is_given() -> None:
    payload = next(stockroom.prompts("train", 1, 0))["payload"]
    episode: Any = SimpleNamespace(payload=payload, seconds_left=lambda: 30.0)
    box = OpenToolbox([tool_of(count)])
    said = await box.call("count", {"box": "red", "item": "pens"}, episode)
    assert said == str(payload["stock"]["red"]["pens"])
    assert await box.call("count", {"box": "red", "item": "pens"}) == "error: count works only within an episode"
    # Whatever a model writes, the episode is the real one.
    assert (await box.call("count", '{"box": "a", "item": "b", "episode": {}}', episode)).startswith("error: episode")


async def test_arguments_are_checked_and_results_are_text() -> None:
    box = OpenToolbox([tool_of(book)])
    said = await box.call("book", '{"name": "Ada", "seats": "2", "place": {"row": 3}}')
    assert said == '{"name":"Ada","seats":2,"kind":"aisle","row":3}'
    assert "seats: Input should be less than or equal to 4" in await box.call("book", {"name": "Ada", "seats": 9})
    assert (await box.call("book", {"name": 3, "seats": 1})).startswith("error: name: ")
    assert (await box.call("book", {"name": "Ada", "seats": 1, "kind": "floor"})).startswith("error: kind: ")


async def test_nothing_is_an_empty_text() -> None:
    def forget() -> None:
        """Forget it."""

    box = OpenToolbox([tool_of(forget)])
    assert await box.call("forget", "") == ""
    assert await box.call("forget", "{}") == ""


def test_functions_that_cannot_be_tools() -> None:
    def untyped(a) -> str: ...  # type: ignore[no-untyped-def]

    def starred(*a: int) -> str: ...

    def odd(a: threading.Thread) -> str: ...

    for function, why in ((untyped, "a has no type"), (starred, "has no name"), (odd, "Thread")):
        with pytest.raises(ConfigError, match=why):
            tool_of(function)


async def test_a_plain_function_that_hangs_holds_up_no_other_call() -> None:
    gate = threading.Event()

    def wait(long: bool) -> str:
        """Wait."""
        if long:
            gate.wait()
        return "here"

    box = OpenToolbox([tool_of(wait, timeout=0.05)])
    try:
        assert await box.call("wait", {"long": True}) == "error: wait took longer than 0.05 s"
        patient = OpenToolbox([tool_of(wait, timeout=30.0)])
        assert await patient.call("wait", {"long": False}) == "here"
    finally:
        gate.set()


async def test_threads_are_bounded_even_when_their_calls_were_given_up() -> None:
    gate, inside = threading.Event(), []

    def wait() -> str:
        """Wait."""
        inside.append(1)
        gate.wait()
        return "here"

    tool = tool_of(wait, timeout=0.2)
    box = OpenToolbox([tool])
    try:
        said = await asyncio.gather(*(box.call("wait", {}) for _ in range(THREADS + 8)))
        assert all(text.startswith("error: wait took longer") for text in said)
        assert len(inside) <= THREADS
    finally:
        gate.set()
    tool.timeout = 30.0  # those that hung have gone: there is room again
    assert await box.call("wait", {}) == "here"


async def test_a_tool_cannot_end_the_node() -> None:
    def leave() -> str:
        """Leave."""
        raise SystemExit(1)

    assert await OpenToolbox([tool_of(leave)]).call("leave", {}) == "error: leave raised SystemExit"
