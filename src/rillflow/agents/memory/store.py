"""Episodes that are worth remembering, found again by what they were asked: a collection in Qdrant.

Without a URL it is Qdrant's local mode in memory, and a journal of our own (JSON lines) from which it is filled again
at a start: Qdrant's own files of that mode are pickles, which nothing here reads or writes. With a URL it is a server,
asked in the very same words; then the server keeps what it is told.

Invariants: at most `most` episodes are kept, the oldest go first; the same episode twice is one; a journal whose last
line was torn by a crash loses that line only. Methods block: call them from a thread.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rillflow.errors import ConfigError, StorageError
from rillflow.storage import disk_errors
from rillflow.types.decoding import json_decoder

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

    from rillflow.agents.tools.embedding import Embedder

log = logging.getLogger(__name__)

_SECONDS = 10  # for a server to answer
_SPACE = uuid.UUID("6f1d5c5e-0c0a-5b4e-9a50-8f6f6d3a7f11")  # of the names of episodes


class Remembered(msgspec.Struct, frozen=True):
    """What is kept of an episode."""

    question: str
    plan: list[str]
    answer: str

    @property
    def id(self) -> str:
        return str(uuid.uuid5(_SPACE, msgspec.json.encode(self).decode()))


class EpisodeStore:
    """One for a process. Several processes may share a server, never a journal."""

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
        """The episodes whose questions are nearest, best first; none whose cosine is below `least`."""
        (vector,) = self._embedder.encode([question])
        with self._lock:
            found = self._client.query_points(
                self._collection, query=vector.tolist(), limit=count, score_threshold=least, with_payload=True
            ).points
        return [msgspec.convert(point.payload, Remembered) for point in found]

    def remember(self, episode: Remembered) -> None:
        """Durable in the journal, or on the server, when this returns."""
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
        """Fill the store from the journal's last `most` episodes, and cut off what a crash left of a line."""
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
                f"{journal} is no journal of episodes: {error}", "remove the line, or the file"
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
    return QdrantClient(url=url, api_key=os.environ.get("QDRANT_API_KEY"), timeout=_SECONDS), models
