"""Whether a real sandbox can be had here; tests that need one are skipped where not, unless they are required."""

from __future__ import annotations

import os
from functools import lru_cache

import pytest

from rillflow.agents.sandbox import Sandbox
from rillflow.errors import SandboxError

REQUIRED = os.environ.get("RILLFLOW_REQUIRE_SANDBOX") == "1"


@lru_cache
def missing() -> str:
    """Why there is no sandbox here; empty where there is one, or where it has to be."""
    if REQUIRED:
        return ""
    try:
        with Sandbox():
            return ""
    except SandboxError as error:
        return f"no sandbox here: {error.message}"


def need_sandbox() -> None:
    if missing():
        pytest.skip(missing())
