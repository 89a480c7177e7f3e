"""What an agent remembers: within a task, and of earlier episodes.

A workflow sees a `Memory`. `TaskMemory` holds what was done in this episode, as text for the next prompt.
`EpisodeMemory` also recalls what was done for the questions that are most like this one, from an `EpisodeStore`: a
collection in Qdrant, searched by the meaning of the question. Without a URL it is Qdrant's local mode in memory, with
our own journal (JSON lines) from which it is filled again at a start, because Qdrant's own files of that mode are
pickles. With a URL it is a server, which keeps the episodes itself.

Invariants: an episode that only evaluates writes nothing. A store that does not answer is left out for this episode,
and the log says so. At most `most` episodes are kept, and the oldest go first; the same episode twice is one; a journal
whose last line was torn by a crash loses only that line. The methods of a store block: call them from a thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import msgspec
from pydantic import Field

from rillflow.config.base import Name, Positive, Section
from rillflow.errors import ConfigError, StorageError
from rillflow.storage import disk_errors
from rillflow.types.base import json_decoder

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

    from rillflow.agents.tools.corpus import Embedder


class MemoryOptions(Section):
    """The memory of earlier episodes, in Qdrant: its local mode in this process, or a server."""

    url: str | None = Field(None, description="of a Qdrant server (key in QDRANT_API_KEY); default: in this process")
    journal: str | None = Field(None, description="JSONL file from which the local store is filled again at a start")
    collection: Name = "episodes"
    recall: Positive = Field(2, description="how many earlier episodes the planner is shown")
    least: Annotated[float, Field(ge=-1, le=1)] = Field(0.6, description="cosine below which none is shown")
    most: Positive = Field(10_000, description="episodes kept; the oldest go first")


class Memory(Protocol):
    """The memory of one episode. Its methods never raise for what a model wrote."""

    async def begin(self, question: str) -> None:
        """Begin an episode: look up earlier episodes with similar questions."""

    def note(self, action: str, action_input: str, result: str) -> None:
        """Add one step that was taken."""

    def text(self) -> str:
        """Return the state as text; empty before the first step if nothing was recalled."""

    def copy(self) -> Memory:
        """Return a memory of the same state, to play on from it in another way."""

    async def end(self, answer: str | None) -> None:
        """End the episode; `answer` is None if the agent did not answer."""


class TaskMemory:
    """The last `steps` steps of this episode, each result cut to `longest` characters."""

    def __init__(self, *, steps: int = 16, longest: int = 1000) -> None:
        self._steps = steps
        self._longest = longest
        self._notes: list[str] = []

    async def begin(self, question: str) -> None:
        self._notes.clear()

    def note(self, action: str, action_input: str, result: str) -> None:
        self._notes.append(f"{action} {action_input}: {_cut(result, self._longest)}")

    def text(self) -> str:
        return "\n".join(self._notes[-self._steps :])

    def copy(self) -> TaskMemory:
        made = TaskMemory(steps=self._steps, longest=self._longest)
        made._notes = list(self._notes)
        return made

    async def end(self, answer: str | None) -> None:
        """Do nothing: this memory ends with its task."""


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} …"


log = logging.getLogger(__name__)

_SERVER_SECONDS = 10  # for a server to answer
_SPACE = uuid.UUID("6f1d5c5e-0c0a-5b4e-9a50-8f6f6d3a7f11")  # of the names of episodes


class Remembered(msgspec.Struct, frozen=True):
    """The record of one episode."""

    question: str
    plan: list[str]
    answer: str

    @property
    def id(self) -> str:
        return str(uuid.uuid5(_SPACE, msgspec.json.encode(self).decode()))


class EpisodeStore:
    """The store of one process. Several processes may share a server, never a journal."""

    def __init__(
        self, embedder: Embedder, *, url: str | None, journal: Path | None, collection: str, most: int
    ) -> None:
        self._client, self._models = _client(url)
        self._embedder = embedder
        self._collection = collection
        self._most = most
        self._journal = journal
        self._own: deque[str] = deque()  # ids in the order of writing, of a store in this process
        self._known: set[str] = set()
        self._local = url is None
        self._lock = threading.Lock()
        if not self._client.collection_exists(collection):
            self._client.create_collection(
                collection,
                vectors_config=self._models.VectorParams(
                    size=len(embedder.encode(["size"])[0]), distance=self._models.Distance.COSINE
                ),
            )
        if self._local and journal is not None:
            self._replay(journal)

    def recall(self, question: str, count: int, least: float) -> list[Remembered]:
        """Return the episodes with the nearest questions, best first, without those whose cosine is below `least`."""
        (vector,) = self._embedder.encode([question])
        with self._lock:
            found = self._client.query_points(
                self._collection, query=vector.tolist(), limit=count, score_threshold=least, with_payload=True
            ).points
        return [msgspec.convert(point.payload, Remembered) for point in found]

    def remember(self, episode: Remembered) -> None:
        """Add an episode. It is in the journal, or on the server, when this returns."""
        with self._lock:
            if episode.id in self._known:
                return
            if self._local and self._journal is not None:
                self._append(self._journal, episode)
            self._put([episode])

    def count(self) -> int:
        with self._lock:
            return int(self._client.count(self._collection).count)

    def close(self) -> None:
        with self._lock:
            self._client.close()

    # ------------------------------------------------------------ writing

    def _put(self, episodes: Sequence[Remembered]) -> None:
        vectors = self._embedder.encode([episode.question for episode in episodes])
        self._client.upsert(
            self._collection,
            [
                self._models.PointStruct(id=episode.id, vector=vector.tolist(), payload=msgspec.to_builtins(episode))
                for episode, vector in zip(episodes, vectors, strict=True)
            ],
        )
        self._own += [episode.id for episode in episodes]
        self._known |= {episode.id for episode in episodes}
        old = [self._own.popleft() for _ in range(len(self._own) - self._most)]
        if old:
            self._known -= set(old)
            self._client.delete(self._collection, self._models.PointIdsList(points=list(old)))

    def _append(self, journal: Path, episode: Remembered) -> None:
        with disk_errors(journal):
            journal.parent.mkdir(parents=True, exist_ok=True)
            with journal.open("ab") as file:
                file.write(msgspec.json.encode(episode) + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def _replay(self, journal: Path) -> None:
        """Fill the store from the journal's last `most` episodes, and cut off a torn last line."""
        if not journal.is_file():
            return
        with disk_errors(journal):
            whole, _, torn = journal.read_bytes().rpartition(b"\n")
            if torn:
                log.warning("%s: its last line was torn and is left out", journal)
                os.truncate(journal, len(whole) + 1 if whole else 0)
        lines = whole.split(b"\n") if whole else []
        try:
            kept = {(episode := json_decoder(Remembered).decode(line)).id: episode for line in lines}
        except msgspec.MsgspecError as error:
            raise StorageError(
                f"{journal} is not a journal of episodes: {error}", "remove the line, or the file"
            ) from error
        if kept:
            self._put(list(kept.values())[-self._most :])


def _client(url: str | None) -> tuple[QdrantClient, Any]:
    try:
        from qdrant_client import QdrantClient, models
    except ImportError:
        raise ConfigError("the package `qdrant-client` is not installed", "pip install 'rillflow[memory]'") from None
    if url is None:
        return QdrantClient(":memory:"), models
    return QdrantClient(url=url, api_key=os.environ.get("QDRANT_API_KEY"), timeout=_SERVER_SECONDS), models


_SECONDS = 15.0
_Result = TypeVar("_Result")


class EpisodeMemory:
    """The memory of one task, after the episodes that `store` recalls."""

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
        """Return the state as text. Earlier plans come without the results of tools, which belonged to other tasks."""
        told = [f"earlier, {known.question} - {', '.join(known.plan)}" for known in self._recalled]
        return "\n".join([*told, *filter(None, [self._task.text()])])

    def copy(self) -> EpisodeMemory:
        """Return a copy that never writes, so that the episode is remembered once."""
        made = EpisodeMemory(self._store, self._options, writes=False)
        made._task, made._question = self._task.copy(), self._question
        made._plan, made._recalled = list(self._plan), list(self._recalled)
        return made

    async def end(self, answer: str | None) -> None:
        if self._writes and answer is not None and self._plan:
            episode = Remembered(self._question, self._plan, answer)
            await _in_thread(lambda: self._store().remember(episode))


def store_of(options: MemoryOptions) -> Callable[[], EpisodeStore]:
    """Return a function that opens the store of this process on its first call. Call it in a thread: it is slow."""
    return lambda: _open(options)


@cache
def _thread() -> ThreadPoolExecutor:
    """Return the one thread for all stores: the embedding model and Qdrant's local mode allow one caller at a time."""
    return ThreadPoolExecutor(1, "memory")


@cache
def _open(options: MemoryOptions) -> EpisodeStore:
    from rillflow.agents.tools.corpus import Embedder

    journal = None if options.journal is None else Path(options.journal).expanduser()
    return EpisodeStore(
        Embedder.load(), url=options.url, journal=journal, collection=options.collection, most=options.most
    )


async def _in_thread(work: Callable[[], _Result]) -> _Result | None:
    """Return the result of `work`, or None if the store fails or is late."""
    try:
        async with asyncio.timeout(_SECONDS):
            return await asyncio.get_running_loop().run_in_executor(_thread(), work)
    except ConfigError:
        raise
    except Exception as error:
        log.warning("the memory of earlier episodes did not answer: %s: %.200s", type(error).__name__, error)
        return None
