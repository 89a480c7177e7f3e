"""An engine process that cannot start leaves nothing behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rillflow.config import load_recipe
from rillflow.engine import main
from rillflow.engine.build import build_engines
from rillflow.errors import EngineError
from rillflow.wire.tokens import Keyring


async def test_an_engine_that_does_not_start_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have started a server already."""
    closed: list[bool] = []
    before = set(threading.enumerate())

    def broken(*settings: Any, **more: Any) -> Any:
        engines = build_engines(*settings, **more)
        (engine,) = engines.values()
        close = engine.close

        async def start() -> None:
            raise EngineError("the server did not come up")

        async def noted() -> None:
            closed.append(True)
            await close()

        engine.start, engine.close = start, noted  # type: ignore[method-assign]
        return engines

    monkeypatch.setattr(main, "build_engines", broken)
    recipe = load_recipe("quickstart", ["policies.agent.weights.source=http://127.0.0.1:1"])
    with pytest.raises(EngineError, match="come up"):
        await main.run_engine(
            "engine-0",
            recipe,
            dataflow_url="http://127.0.0.1:1",
            token="t",
            keyring=Keyring.of_run("t"),
            weights=tmp_path / "weights",
            on_ready=lambda url: None,
        )
    assert closed == [True]
    assert "weights" not in {thread.name for thread in set(threading.enumerate()) - before}
