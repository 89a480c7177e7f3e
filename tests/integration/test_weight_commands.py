"""`rillflow weights` and `rillflow relay` as real processes: nodes far from the run's folder get its weights."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from commands import Cli, Started, wait_until
from rillflow.config import load_recipe
from rillflow.errors import WireError
from rillflow.runtime.folder import RunFolder
from rillflow.weights.manifest import key_of, signed
from rillflow.weights.transport.sources import HttpSource
from weight_servers import publish, some_bytes

DATA = some_bytes(2_000_000)

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose trainer has published version 7 of its policy."""
    made = RunFolder.create(load_recipe("quickstart"), tmp_path / "runs")
    monkeypatch.setattr("weight_servers.signed", lambda value, _: signed(value, key_of(made.token_of("node"))))
    publish(made.root / "weights", 7, {"model.bin": DATA}, policy=made.recipe.policy)
    return made


def listening(started: Started) -> str:
    """Return the address that a relay prints."""
    found: list[str] = []

    def said() -> bool:
        assert started.process.poll() is None, started.output()
        found[:] = re.findall(r"http://127\.0\.0\.1:\d+(?=, cache)", started.output())
        return bool(found)

    wait_until(said, "the relay", 600)
    return found[0]


async def _read(url: str, folder: RunFolder, cache: Path) -> bytes:
    policy, token = folder.recipe.policy, folder.token_of("node")
    source = HttpSource(f"{url}/{policy}", cache=cache, key=key_of(token), token=token)
    try:
        assert (await source.line()).head == 7
        return (await source.file(7, "model.bin")).read_bytes()
    finally:
        await source.close()


def served(cli: Cli, folder: RunFolder) -> tuple[Started, str]:
    folder.forget_endpoint("weights")
    server = cli.start("weights", str(folder.root))
    wait_until(lambda: folder.endpoint("weights"), "the weight server", 600)
    return server, str(folder.endpoint("weights"))


def test_from_the_run_through_a_relay(cli: Cli, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    server, url = served(cli, folder)
    token = cli.run("token", str(folder.root), "reader").output().strip()
    assert token == folder.token_of("reader")
    monkeypatch.setenv("RILLFLOW_WEIGHTS_TOKEN", token)
    relay = cli.start("relay", "--upstream", url, "--cache", str(cli.cwd / "relay"), "--limit", "0.1")
    near = listening(relay)
    assert asyncio.run(_read(near, folder, cli.cwd / "a")) == DATA

    for process in (server, relay):  # both end by a signal, and the relay has what it fetched
        process.process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM, process.output()
    alone = cli.start("relay", "--upstream", url, "--cache", str(cli.cwd / "relay"), "--limit", "0.1")
    assert asyncio.run(_read(listening(alone), folder, cli.cwd / "b")) == DATA
    for process in cli.started:
        assert folder.token not in process.output()


def test_the_server_comes_back_where_it_was(cli: Cli, folder: RunFolder) -> None:
    server, url = served(cli, folder)
    server.process.kill()
    server.process.wait(120)
    cli.start("weights", str(folder.root))
    assert asyncio.run(_until(lambda: _read(url, folder, cli.cwd / "a"))) == DATA


async def _until(work: Callable[[], Awaitable[bytes]]) -> bytes:
    for _ in range(600):
        try:
            return await work()
        except WireError:
            await asyncio.sleep(0.1)
    raise AssertionError("nobody answered for a minute")
