"""What all tests share: a scrubbed environment and small waits with deadlines."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from scrubbing import scrub

pytest_plugins = ["commands"]

torch.set_num_threads(1)

# No deadline for examples: a busy machine must not fail a test.
hypothesis.settings.register_profile("rillflow", deadline=None)
hypothesis.settings.load_profile("rillflow")


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


@pytest.fixture(autouse=True)
def _scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the machine happens to have set."""
    scrub(monkeypatch)
