"""Preloaded by a fork server in tests: its children run the code in their first argument instead of `rillflow`."""

from __future__ import annotations

import sys

import rillflow.cli.main


def app() -> None:
    exec(sys.argv[1], {"__name__": "__main__"})
    sys.exit(0)


rillflow.cli.main.app = app  # type: ignore[assignment]
