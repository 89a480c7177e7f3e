from __future__ import annotations

from collections.abc import Iterator

import pytest

from rillflow.agents.sandbox import Sandbox, SandboxConfig
from tests.sandboxed import need_sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    need_sandbox()
    with Sandbox(SandboxConfig(seconds=30, memory=256)) as opened:
        yield opened
