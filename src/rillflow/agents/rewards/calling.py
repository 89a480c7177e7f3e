"""Calling a reward, be it async or plain.

Invariant: plain code never holds up the loop that its caller lives on, nor the exit of the process.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rillflow.errors import RewardError


async def call(reward: Callable[..., Any], payload: dict[str, Any], answer: Any) -> Any:
    """What a reward says, whichever way it is written."""
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        return await reward(payload, answer)
    return await in_thread(reward, payload, answer)


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run plain code off the loop, in a daemon thread: one that never returns holds nothing up, not even the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*arguments)
        except Exception as error:
            failure = error
        except BaseException as error:  # sys.exit() in a reward must not end the node
            failure = RewardError(f"the reward raised {type(error).__name__}")
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await future
