"""Readers of weights over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from http_reader import DATA, NAME, Reader

from rillflow.weights.transport import download as downloads
from rillflow.weights.transport import mirrors as servers
from weight_servers import publish, served


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are short; their meaning stays."""
    monkeypatch.setattr(downloads, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(downloads, "_LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(servers, "_FIRST_REST", 0.05)


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    publish(tmp_path / "weights", 7, {NAME: DATA})
    async with served(tmp_path / "weights") as url:
        yield url


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[Reader]:
    made = Reader(tmp_path / "cache")
    yield made
    await made.close()
