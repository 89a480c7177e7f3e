"""What all tests share: a scrubbed environment and small waits with deadlines."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

pytest_plugins = ["commands", "durations", "needs", "pytester"]

torch.set_num_threads(1)

# No deadline for examples: a busy machine must not fail a test.
hypothesis.settings.register_profile("rillflow", deadline=None)
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
