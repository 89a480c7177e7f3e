"""A node in a thread of its trainer's process: it starts, ends, fails and is left behind in an orderly way."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rillflow.config.runs import ResourcesConfig
from rillflow.errors import RunError, WeightsError
from rillflow.rollout.handover import Handover
from rillflow.runtime import hosted
from rillflow.runtime.hosted import NodeThread, Play, Rests
from rillflow.types import TokenScope
from rillflow.wire.tokens import Keyring, scoped_token


@contextmanager
def started(play: Play) -> Iterator[tuple[NodeThread, threading.Event]]:
    failed = threading.Event()
    node = NodeThread(Handover("p"), play, failed.set)
    try:
        node.start()
        yield node, failed
    finally:
        node.close()


def test_a_node_that_finishes_is_waited_for() -> None:
    over = threading.Event()

    async def play(handover: Handover, on_ready: Callable[[], None]) -> None:
        on_ready()
        await asyncio.to_thread(over.wait, 20)

    with started(play) as (node, failed):
        assert not node.has_ended(0.01)
        over.set()
        assert node.has_ended(20)
        assert not failed.is_set()
        node.begin({}, 1)  # it has ended: nothing to begin
        node.end()


def test_what_a_node_fails_with_is_told_and_raised() -> None:
    go = threading.Event()

    async def play(handover: Handover, on_ready: Callable[[], None]) -> None:
        on_ready()
        await asyncio.to_thread(go.wait, 20)
        raise WeightsError("broken")

    with started(play) as (node, failed):
        node.check()
        go.set()
        assert failed.wait(20)
        with pytest.raises(WeightsError, match="broken"):
            node.has_ended(20)
        with pytest.raises(WeightsError, match="broken"):
            node.begin({}, 1)
        node.end()  # the trainer's own way out is not barred


def test_a_node_that_fails_at_its_start_never_begins() -> None:
    async def play(handover: Handover, on_ready: Callable[[], None]) -> None:
        raise RunError("no model")

    with pytest.raises(RunError, match="no model"), started(play):
        pass


def test_a_node_that_does_not_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "_START", 0.05)

    async def play(handover: Handover, on_ready: Callable[[], None]) -> None:
        await asyncio.sleep(60)

    with pytest.raises(RunError, match="did not start"), started(play):
        pass


def test_a_node_that_plays_is_cancelled_and_waited_for() -> None:
    left: list[str] = []

    async def play(handover: Handover, on_ready: Callable[[], None]) -> None:
        on_ready()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            left.append("in order")

    with started(play):
        pass
    assert left == ["in order"]


class Folder:
    """As much of a run folder as a node needs that never plays."""

    token = "t" * 32
    keyring = Keyring.of_run(token)

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recipe = _Recipe()

    def token_of(self, scope: TokenScope) -> str:
        return scoped_token(self.token, scope)

    def gateway(self, name: str) -> Path:
        return self.root / name

    def last_port(self, name: str) -> int:
        return 0

    def publish_endpoint(self, name: str, url: str) -> None:
        (self.root / name).write_text(url)


class _Recipe:
    policy = "p"
    resources = ResourcesConfig()

    class rollout:
        episode_timeout = 60.0

    class runtime:
        host = "127.0.0.1"


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: Any, train: Callable[[Any], bool]) -> bool:
    async def run_node(name: str, recipe: Any, **more: Any) -> None:
        more["on_ready"]("http://here")
        await node()

    monkeypatch.setattr(hosted, "run_node", run_node)
    return hosted.run_hosted(Folder(tmp_path), "node", "http://dataflow", train)  # type: ignore[arg-type]


def test_a_finished_trainer_plays_on_until_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = threading.Event()

    async def node() -> None:
        await asyncio.to_thread(trained.wait, 20)

    def train(generator: Any) -> bool:
        trained.set()
        return True

    assert run(tmp_path, monkeypatch, node, train)
    assert (tmp_path / "node").read_text() == "http://here"


def test_a_signal_while_it_plays_on_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(generator: Any) -> bool:
        signal.raise_signal(signal.SIGTERM)
        return True

    before = signal.getsignal(signal.SIGTERM)
    assert not run(tmp_path, monkeypatch, lambda: asyncio.sleep(60), train)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_while_the_node_starts_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = NodeThread.start

    def interrupted(node: NodeThread) -> None:
        start(node)
        signal.raise_signal(signal.SIGTERM)

    def train(generator: Any) -> bool:
        raise AssertionError("it was asked to stop")

    monkeypatch.setattr(NodeThread, "start", interrupted)
    assert not run(tmp_path, monkeypatch, lambda: asyncio.sleep(60), train)


def test_a_failed_node_stops_its_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, stopped = threading.Event(), threading.Event()

    async def node() -> None:
        await asyncio.to_thread(go.wait, 20)
        raise WeightsError("broken")

    def train(generator: Any) -> bool:
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
        go.set()
        return not stopped.wait(20)

    with pytest.raises(WeightsError, match="broken"):
        run(tmp_path, monkeypatch, node, train)


def test_a_rank_that_only_trains_goes_through_the_same_steps() -> None:
    rests = Rests()
    rests.begin({}, 1)
    rests.end()
