"""An environment for tests that does not depend on the machine."""

from __future__ import annotations

import os

import pytest


def scrub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove from the environment what the machine happens to have set."""
    for name in list(os.environ):
        kept = name in {"RILLFLOW_DATA", "RILLFLOW_SOAK"}
        if name.startswith(("RILLFLOW_", "OPENAI_", "ANTHROPIC_")) and not kept:
            monkeypatch.delenv(name)
    monkeypatch.setenv("RILLFLOW_WARM", "")  # a test starts its own, or none
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
