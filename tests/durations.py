"""Record how long each plain test takes, for `scripts/touched_tests.py`, in pytest's cache."""

from __future__ import annotations

import pytest

from scripts.touched_tests import SLOW_MARKS

KEY = "rillflow/durations"


class Durations:
    """Seconds of set-up, call and tear-down of each test that passed."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and not SLOW_MARKS & set(report.keywords):
            self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        cache = getattr(session.config, "cache", None)  # missing with `-p no:cacheprovider`
        if cache is not None and self._seconds:
            rounded = {test: round(seconds, 3) for test, seconds in self._seconds.items()}
            cache.set(KEY, {**cache.get(KEY, {}), **rounded})


def pytest_configure(config: pytest.Config) -> None:
    # Only the controller of pytest-xdist sees all reports; its workers have `workerinput`.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(), "rillflow-durations")
