"""Calling a reward, be it async or plain.

Invariant: plain code never holds up the loop that its caller lives on, nor the exit of the process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from rillflow.errors import RewardError
from rillflow.wire import in_daemon


async def call(reward: Callable[..., Any], payload: dict[str, Any], answer: Any) -> Any:
    """What a reward says, whichever way it is written."""
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        return await reward(payload, answer)
    return await in_thread(reward, payload, answer)


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run plain code off the loop, in a daemon thread: one that never returns holds nothing up, not even the exit."""

    def exited(error: BaseException) -> Exception:  # sys.exit() in a reward must not end the node
        return RewardError(f"the reward raised {type(error).__name__}")

    return await in_daemon(partial(function, *arguments), "reward", exited=exited)
