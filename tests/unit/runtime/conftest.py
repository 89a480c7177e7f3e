"""Fixtures for the tests of runs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no fork server for a `LocalRun`: its processes are stand-ins here. `test_preloaded` makes its own."""
    monkeypatch.setattr("rillflow.runtime.local.available", lambda: False)
