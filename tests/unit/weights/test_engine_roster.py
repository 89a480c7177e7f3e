"""The roster of engine processes: those that reported recently, over HTTP and with an injected clock."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.errors import BadRequest
from rillflow.types import EngineInfo
from rillflow.weights.updates import SILENT_SECONDS, EngineRoster


class HandClock:
    time = 100.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def info(name: str = "engine-0", url: str = "http://127.0.0.1:9", **known: Any) -> EngineInfo:
    return EngineInfo(name=name, url=url, versions={"p": 1}, context=64, slots=4, **known)


def test_those_who_are_silent_for_too_long_are_left_out() -> None:
    clock = HandClock()
    roster = EngineRoster(clock)
    roster.hear(info("a"))
    clock.time += SILENT_SECONDS - 1
    assert [one.name for one in roster.hear(info("b")).engines] == ["a", "b"]
    clock.time += 2
    assert [one.name for one in roster.engines().engines] == ["b"]
    assert [one.name for one in roster.hear(info("a")).engines] == ["b", "a"]


def test_the_last_word_counts() -> None:
    roster = EngineRoster(HandClock())
    roster.hear(info(running=1))
    roster.hear(info(url="http://127.0.0.1:10", running=2))
    assert [(one.url, one.running) for one in roster.engines().engines] == [("http://127.0.0.1:10", 2)]


@pytest.mark.parametrize("bad", [info(name=""), info(name="x" * 201), info(url="file:///etc"), info(url="")])
def test_what_is_no_engine_is_refused(bad: EngineInfo) -> None:
    roster = EngineRoster(HandClock())
    with pytest.raises(BadRequest):
        roster.hear(bad)
    assert roster.engines().engines == []


def test_the_roster_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.weights.updates._MOST", 2)
    clock = HandClock()
    roster = EngineRoster(clock)
    roster.hear(info("a"))
    roster.hear(info("b"))
    with pytest.raises(BadRequest, match="already"):
        roster.hear(info("c"))
    roster.hear(info("b"))
    clock.time += SILENT_SECONDS + 1
    roster.hear(info("c"))
