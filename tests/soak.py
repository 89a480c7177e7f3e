"""Sizes of the tests that repeat: short in CI, long in `make soak`, which sets RILLFLOW_SOAK=1.

A test with two sizes has the marker `soak`, unless hypothesis makes its examples: `make soak` runs all of those. Its
short form reaches the same code as its long one. The variable is read once, when tests are collected: each test runs in
a scrubbed environment.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
SOAK = os.environ.get("RILLFLOW_SOAK") == "1"


def repetitions(short: T, long: T) -> T:
    """Return the size of a test: `long` in `make soak`, else `short`."""
    return long if SOAK else short
