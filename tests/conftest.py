"""What all tests share: a scrubbed environment, an amount of repetition, and collection that costs little."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import certifi
import hypothesis
import pytest

from repetition import PROFILE, VARIABLE

pytest_plugins = ["commands"]

# Every worker imports the same modules, and so does every process that a test starts. Compile each of them once, also
# on a machine that asks Python to write no bytecode.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No deadline for examples: a busy machine must not fail a test.
hypothesis.settings.register_profile("plain", deadline=None)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=500)
hypothesis.settings.load_profile(PROFILE)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from looking at modules and collected tests: none of them goes away."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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
    for name in list(os.environ):
        kept = name in {"RILLFLOW_DATA", VARIABLE}
        if name.startswith(("RILLFLOW_", "OPENAI_", "ANTHROPIC_")) and not kept:
            monkeypatch.delenv(name)
    monkeypatch.setenv("SSL_CERT_FILE", authority)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
