"""What all tests share: a scrubbed environment and small waits with deadlines."""

from __future__ import annotations

import os

import pytest
import torch

pytest_plugins = ["commands"]

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the machine happens to have set."""
    for name in list(os.environ):
        if name.startswith(("RILLFLOW_", "OPENAI_", "ANTHROPIC_")) and name != "RILLFLOW_DATA":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
