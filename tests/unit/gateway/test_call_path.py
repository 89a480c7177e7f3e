"""The path of a model call is the one that docs/gateway.md draws, in at most six modules."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rillflow
from counting_engine import CountingEngine
from rillflow.config import SamplingConfig
from rillflow.engine.host import EngineHost
from rillflow.gateway import Gateway, Policy
from rillflow.gateway.engine_pool import EnginePool, Fleet
from rillflow.types import Chunk, GenerateRequest
from tiny_policy import tiny_renderer

PACKAGE = Path(rillflow.__file__).parent
PAGE = Path(__file__).resolve().parents[3] / "docs" / "gateway.md"
BODY = msgspec.json.encode({"model": "agent", "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 3})


def modules_on_the_stack() -> list[str]:
    """Return the modules of the package that await each other here, from the outermost on, each once."""
    found: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            found.insert(0, str(path.relative_to(PACKAGE)).removeprefix("gateway/"))
        frame = frame.f_back
    return list(dict.fromkeys(found))


class RecordingEngine(CountingEngine):
    def __init__(self) -> None:
        super().__init__(context=256)
        self.crossed: list[str] = []

    def generate(self, asked: GenerateRequest) -> AsyncIterator[Chunk]:
        self.crossed = modules_on_the_stack()
        return super().generate(asked)


async def test_a_model_call_crosses_the_modules_that_the_page_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, renderer, placed = RecordingEngine(), tiny_renderer(), list[str]()
    first = renderer.first

    def recorded(*arguments: Any) -> Any:
        placed.extend(modules_on_the_stack())
        return first(*arguments)

    monkeypatch.setattr(renderer, "first", recorded)
    fleet = Fleet([EngineHost("e", {"agent": engine})])
    policy = Policy(EnginePool("agent", fleet, context=256), renderer)
    gateway = Gateway("token", {"agent": policy}, {"agent": SamplingConfig()})
    gateway.sessions.open("s", seed=1, group="g", deadline_seconds=120)
    await gateway.chat("s", BODY, "")
    await fleet.close()
    drawn = re.findall(r"^\d\. `([\w/]+\.py)`", PAGE.read_text(), re.MULTILINE)
    assert len(drawn) == 6
    assert engine.crossed == [name for name in drawn if name != "calls.py"]
    assert placed[:3] == ["server.py", "lifetime.py", "calls.py"], "the answers are begun before they are read"
