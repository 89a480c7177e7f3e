"""Where published weights are read from, whatever carries them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rillflow.weights.manifest import Line, VersionManifest


class WeightSource(Protocol):
    """Where a policy's published files can be had: a folder, an object store, a weight server, a relay.

    What it returns is verified: signatures where it has the key, sizes and hashes always; CorruptData otherwise.
    """

    async def line(self, known: Line | None = None, wait: float = 0.0) -> Line:
        """With `known`, returns as soon as the line is another one, or after `wait` seconds."""

    async def manifest(self, version: int) -> VersionManifest:
        """WeightsError when the version is not there."""

    async def file(self, version: int, name: str) -> Path:
        """A local file with the content: the very file, or a copy that stays until `forget`. What was fetched of it
        before is not fetched again."""

    async def forget(self, version: int) -> None:
        """This reader needs the version's files no more."""

    async def close(self) -> None: ...
