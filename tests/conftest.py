"""What all tests share: a scrubbed environment and small waits with deadlines."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

pytest_plugins = ["commands"]

torch.set_num_threads(1)

# A shell without job control starts background commands with SIGINT ignored, and children inherit that. Tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No time limits for examples or for drawing them: a busy machine must not fail a test.
hypothesis.settings.register_profile("rillflow", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("rillflow")


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


@pytest.fixture(autouse=True)
def _scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the machine happens to have set."""
    for name in list(os.environ):
        if name.startswith(("RILLFLOW_", "OPENAI_", "ANTHROPIC_")) and name != "RILLFLOW_DATA":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
