"""Plain code beside an event loop: whatever it raises is heard of."""

from __future__ import annotations

import asyncio

import pytest

from rillflow.wire import in_daemon


async def test_an_end_of_iteration_reaches_the_caller() -> None:
    """A future does not take it: the caller would wait until its deadline."""
    with pytest.raises(RuntimeError, match="StopIteration: over") as raised:
        await asyncio.wait_for(in_daemon(_over, "plain", exited=lambda _: ValueError()), 30)
    assert isinstance(raised.value.__cause__, StopIteration)


def _over() -> None:
    raise StopIteration("over")
