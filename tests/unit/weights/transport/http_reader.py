"""A reader of weights over HTTP, whose sources are closed with it, and the file that it reads."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rillflow.weights.transport.sources import HttpSource
from weight_servers import KEY, POLICY, TOKEN, some_bytes

SIZE = 3_000_000
DATA = some_bytes(SIZE)
NAME = "model.bin"


class Reader:
    """Sources that are closed at the end of a test."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._made: list[HttpSource] = []

    def __call__(self, *urls: str, **options: object) -> HttpSource:
        options = {"cache": self.cache, "key": KEY, "token": TOKEN, "patience": 20.0} | options
        self._made.append(HttpSource(f"{','.join(urls)}/{POLICY}", **options))  # type: ignore[arg-type]
        return self._made[-1]

    async def close(self) -> None:
        for source in self._made:
            await source.close()


def as_given(source: HttpSource) -> None:
    """The first server counts as the nearest."""
    source._mirrors._probing = asyncio.create_task(asyncio.sleep(0))
