"""Threads beside a busy event loop get the interpreter back soon."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rillflow.wire import take_short_turns


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_turns_become_shorter_and_never_longer() -> None:
    sys.setswitchinterval(0.005)
    take_short_turns()
    short = sys.getswitchinterval()
    assert short < 0.001
    sys.setswitchinterval(short / 2)
    take_short_turns()
    assert sys.getswitchinterval() < short
