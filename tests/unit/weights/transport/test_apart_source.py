"""A source in a thread of its own gets on while its reader's loop is busy, and stops when its reader does."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from rillflow.errors import WeightsError
from rillflow.weights.transport.sources import ApartSource, HttpSource
from weight_servers import KEY, POLICY, TOKEN, publish, served, some_bytes

DATA = some_bytes(1_000_000)


class Server(threading.Thread):
    """A weight server that does not share the test's loop."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self._root = root
        self._up, self._end = threading.Event(), threading.Event()
        self.url = ""

    def run(self) -> None:
        async def main() -> None:
            async with served(self._root) as self.url:
                self._up.set()
                await asyncio.to_thread(self._end.wait)

        asyncio.run(main())

    def __enter__(self) -> Server:
        self.start()
        assert self._up.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join(60)


async def test_it_gets_on_while_the_loop_is_busy(tmp_path: Path) -> None:
    publish(tmp_path / "weights", 7, {"model.bin": DATA})
    with Server(tmp_path / "weights") as server:
        inner = HttpSource(f"{server.url}/{POLICY}", cache=tmp_path / "c", key=KEY, token=TOKEN)
        source = ApartSource(inner)
        assert (await source.line()).head == 7
        assert (await source.manifest(7)).version == 7
        with pytest.raises(WeightsError):
            await source.manifest(8)
        fetch = asyncio.create_task(source.file(7, "model.bin"))
        await asyncio.sleep(0)
        end = time.monotonic() + 60
        while not inner.transfers and time.monotonic() < end:
            time.sleep(0.01)  # noqa: ASYNC251
        assert inner.transfers  # without one turn of this loop
        path = await fetch
        assert path.read_bytes() == DATA
        await source.forget(7)
        assert not path.exists()
        waiting = asyncio.create_task(source.line(await source.line(), 60.0))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await source.close()
        assert not source._loop._thread.is_alive()
