"""Long texts are read, rendered and tokenised in threads, so that nobody's text keeps the other sessions waiting.

Tokenising megabytes takes seconds, in which the tokenizer lets other threads run. A short text stays on the event loop,
where it takes less time than the way to a thread and back.

The work in a thread changes nothing of a session. It is done under the session's `turn`: a session has one text in a
thread at a time, so that none takes all threads, and its calls are placed in the order in which they came. Work that
has begun cannot be ended; a call whose client has gone keeps its session's turn until its thread is free.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rillflow.wire import in_thread, take_short_turns

SHORT = 4 << 10  # bytes of a text that is tokenised on the event loop, in two milliseconds at most
SHORT_BODY = 128 << 10  # bytes of a request that is read there
THREADS = 2

Result = TypeVar("Result")


class TextThreads:
    """The threads of one gateway; they start with the first long text."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "gateway-texts")

    async def run(self, work: Callable[[], Result], *, long: bool) -> Result:
        """Return the result of `work`, from a thread where it is `long`. The caller has its session's turn."""
        if not long:
            return work()
        take_short_turns()
        return await in_thread(work, self._pool)

    def close(self) -> None:
        """Work that has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
