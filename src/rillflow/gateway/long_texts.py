"""Long texts: refused if they cannot fit into the model's context, else processed in threads.

Rendering and tokenising take time that grows with the text, so a text that cannot fit is refused by its length alone.
Tokenising megabytes takes seconds, in which the tokenizer releases the interpreter lock, so it runs in a thread and
other sessions go on. A short text stays on the event loop, because a thread would take longer.

The work in a thread changes nothing in a session. It is done under the session's `turn`: a session has one text in a
thread at a time, so that no session takes all threads, and its calls are placed in the order in which they came. Work
that has begun cannot be cancelled; a call whose client has gone keeps its session's turn until its thread is free.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from rillflow.errors import ContextOverflow
from rillflow.gateway.trees.render import Renderer
from rillflow.wire import in_thread, take_short_turns

SHORT = 4 << 10  # most bytes of a text that is tokenised on the event loop, in at most 2 ms
SHORT_BODY = 128 << 10  # most bytes of a request that is decoded there
THREADS = 2

Result = TypeVar("Result")


class TextThreads:
    """The threads of one gateway. They start with the first long text."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "gateway-texts")

    async def run(self, work: Callable[[], Result], *, long: bool) -> Result:
        """Return the result of `work`, run in a thread if it is `long`. The caller holds its session's turn."""
        if not long:
            return work()
        take_short_turns()
        return await in_thread(work, self._pool)

    def close(self) -> None:
        """Drop work that has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def refuse_too_long(request: msgspec.Struct, renderer: Renderer, context: int) -> None:
    """Raise ContextOverflow if the text of a decoded request cannot fit into `context` tokens.

    Everything in the request counts, whatever its dialect and field, so a new field is counted too.
    """
    most = renderer.characters_of(context)
    if _characters(request, most) >= most:
        raise ContextOverflow(
            f"this model's context is {context} tokens, and a request with {most} characters cannot fit"
        )


def _characters(value: Any, most: int) -> int:
    """Count the characters of all texts in `value`, with numbers and keys of JSON objects, up to about `most`."""
    counted = 0
    left = [value]
    while left and counted < most:
        part = left.pop()
        if isinstance(part, str):
            counted += len(part)
        elif isinstance(part, dict):
            left += part
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif isinstance(part, msgspec.Struct):
            left += [getattr(part, name) for name in part.__struct_fields__]
        elif part is not None:
            counted += 1
    return counted
