"""Record how long each plain test takes, for `scripts/touched_tests.py`, in pytest's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.touched_tests import SLOW_MARKS

KEY = "rillflow/durations"


class Durations:
    """Seconds of set-up, call and tear-down of each test that passed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        named = set(Path(report.nodeid.partition("::")[0]).parts)  # folders are keywords, too
        if report.passed and not SLOW_MARKS & (set(report.keywords) - named):
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        cache = getattr(session.config, "cache", None)  # missing with `-p no:cacheprovider`
        if cache is not None and self.seconds:
            rounded = {test: round(seconds, 3) for test, seconds in self.seconds.items()}
            cache.set(KEY, {**cache.get(KEY, {}), **rounded})


def pytest_configure(config: pytest.Config) -> None:
    # Only the controller of pytest-xdist sees all reports; its workers have `workerinput`.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(), "rillflow-durations")
