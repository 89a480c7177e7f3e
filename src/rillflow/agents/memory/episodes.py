"""Memory that reaches beyond its task: what was done for the questions that are most like this one.

Invariant: an episode that only evaluates writes nothing. A store that cannot be asked is forgotten for this episode,
with a word in the log: an agent without memories is slower, not broken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar

from rillflow.agents.memory.options import MemoryOptions
from rillflow.agents.memory.store import EpisodeStore, Remembered
from rillflow.agents.memory.task import TaskMemory
from rillflow.errors import ConfigError

log = logging.getLogger(__name__)

_SECONDS = 15.0
_Result = TypeVar("_Result")


class EpisodeMemory:
    """A task's memory, with what `store` recalls in front of it."""

    def __init__(self, store: Callable[[], EpisodeStore], options: MemoryOptions, *, writes: bool) -> None:
        self._store = store
        self._options = options
        self._writes = writes
        self._task = TaskMemory()
        self._question = ""
        self._plan: list[str] = []
        self._recalled: list[Remembered] = []

    async def begin(self, question: str) -> None:
        await self._task.begin(question)
        self._question, self._plan = question, []
        options = self._options
        found = await _in_thread(lambda: self._store().recall(question, options.recall, options.least))
        self._recalled = found or []

    def note(self, action: str, action_input: str, result: str) -> None:
        self._task.note(action, action_input, result)
        self._plan.append(f"{action} {action_input}")

    def text(self) -> str:
        """Earlier plans come without what tools said then: that was another world."""
        told = [f"earlier, {known.question} - {', '.join(known.plan)}" for known in self._recalled]
        return "\n".join([*told, *filter(None, [self._task.text()])])

    def copy(self) -> EpisodeMemory:
        """A copy never writes: the episode is remembered once."""
        made = EpisodeMemory(self._store, self._options, writes=False)
        made._task, made._question = self._task.copy(), self._question
        made._plan, made._recalled = list(self._plan), list(self._recalled)
        return made

    async def end(self, answer: str | None) -> None:
        if self._writes and answer is not None and self._plan:
            episode = Remembered(self._question, self._plan, answer)
            await _in_thread(lambda: self._store().remember(episode))


def store_of(options: MemoryOptions) -> Callable[[], EpisodeStore]:
    """The store of this process, opened when it is asked for first: in a thread, for that takes a while."""
    return lambda: _open(options)


@cache
def _thread() -> ThreadPoolExecutor:
    """One for all: the embedding model and Qdrant's local mode want one caller at a time."""
    return ThreadPoolExecutor(1, "memory")


@cache
def _open(options: MemoryOptions) -> EpisodeStore:
    from rillflow.agents.tools.embedding import Embedder

    journal = None if options.journal is None else Path(options.journal).expanduser()
    return EpisodeStore(
        Embedder.load(), url=options.url, journal=journal, collection=options.collection, most=options.most
    )


async def _in_thread(work: Callable[[], _Result]) -> _Result | None:
    """What the store says; None where it does not, or not in time."""
    try:
        async with asyncio.timeout(_SECONDS):
            return await asyncio.get_running_loop().run_in_executor(_thread(), work)
    except ConfigError:
        raise
    except Exception as error:
        log.warning("the memory of earlier episodes did not answer: %s: %.200s", type(error).__name__, error)
        return None
