from __future__ import annotations

from collections.abc import Iterator

import pytest

from needs import require
from rillflow.agents.sandbox import Sandbox, SandboxConfig


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    require("bubblewrap")
    with Sandbox(SandboxConfig(seconds=30, memory=256)) as opened:
        yield opened
