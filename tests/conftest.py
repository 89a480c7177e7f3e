"""The setup of all tests: a scrubbed environment, an amount of repetition, and collection that costs little."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import certifi
import hypothesis
import pytest

from scrubbing import scrub
from soak import repetitions

pytest_plugins = ["commands", "durations", "needs", "pytester"]

# Every worker imports the same modules, and so does every process that a test starts. Compile each of them once, also
# on a machine that asks Python to write no bytecode.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell without job control starts background commands with SIGINT ignored, and children inherit that. Tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No time limits for examples or for drawing them: a busy machine must not fail a test.
hypothesis.settings.register_profile(
    "rillflow",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=repetitions(40, 500),
)
hypothesis.settings.load_profile("rillflow")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from looking at modules and collected tests: none of them goes away."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


SLOW_SECONDS = 1800  # until a slow test is taken for one that hangs; it usually takes one or two minutes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give whole runs more time than plain tests have: other runs beside them need the same cores."""
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("chaos"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Disable the garbage collector while a report is made.

    CPython 3.11 has one recursion counter for all syntax trees. A finaliser that logs a traceback while pytest formats
    another one crashes the interpreter.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Let torch compute in one thread: the workers share the cores. Import it only where tests run."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file with one certificate authority.

    A new HTTP client reads all authorities (50 ms). Tests make hundreds of clients, which talk to this machine only.
    """
    end = "-----END CERTIFICATE-----\n"
    first = Path(certifi.where()).read_text().partition(end)[0]
    file = tmp_path_factory.mktemp("authority") / "one.pem"
    file.write_text(first[first.index("-----BEGIN CERTIFICATE-----") :] + end)
    return str(file)


@pytest.fixture(autouse=True)
def _scrubbed(monkeypatch: pytest.MonkeyPatch, authority: str) -> None:
    """No test depends on what the machine happens to have set."""
    scrub(monkeypatch)
    monkeypatch.setenv("SSL_CERT_FILE", authority)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
