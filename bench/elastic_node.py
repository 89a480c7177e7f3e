"""A rollout node for `bench.elastic`: `rillflow rollout`, but for two things.

Its engine takes at least ELASTIC_STEP_SECONDS for every decode step, however quick this machine is: the time of a
device that it does not have. And it sees nothing of the run's folder, as on another host: weights come and samples go
over HTTP.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from rillflow.cli.main import app
from rillflow.clients import joining, unit_directory
from rillflow.engine.embedded.engine import EmbeddedEngine

STEP_VARIABLE = "ELASTIC_STEP_SECONDS"


def pace(seconds: float) -> None:
    """Make every step of an embedded engine in this process take at least `seconds`."""
    step = EmbeddedEngine._step

    async def paced(engine: EmbeddedEngine) -> None:
        began = time.monotonic()
        await step(engine)
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))

    EmbeddedEngine._step = paced  # type: ignore[method-assign]


def leave_home() -> None:
    """Folders of the run cannot be read on another host."""
    joining.is_here = lambda folder, token, scope: False
    unit_directory.is_here = lambda info: False


if __name__ == "__main__":
    pace(float(os.environ[STEP_VARIABLE]))
    leave_home()
    app(["rollout", *sys.argv[1:]])
