"""The barrier across the policies of the synchronous side of `bench.multipolicy`, as a node of their step graphs.

The trainers are processes on one machine: each leaves a file when it has made a step, and looks for the others' files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.errors import RunError
from rillflow.trainer.graph import function

if TYPE_CHECKING:
    from rillflow.trainer.graph.worker import Step

_LOOK_EVERY = 0.005  # seconds between two looks at whether the other policies have come
_PATIENCE = 300.0


@function("publish_together", role="actor", kind="publish")
def publish_together(step: Step, folder: str, policy: str, policies: Sequence[str]) -> None:
    """Publish the new weights once every policy has made this step, as one controller of all policies does."""
    (Path(folder) / f"{policy}-{step.number}").touch()
    awaited = [Path(folder) / f"{other}-{step.number}" for other in policies]
    end = time.monotonic() + _PATIENCE
    while missing := [path.name for path in awaited if not path.exists()]:
        if time.monotonic() > end:
            raise RunError(f"{', '.join(missing)} did not reach the barrier within {_PATIENCE:.0f} s", "see RUN/logs")
        time.sleep(_LOOK_EVERY)
    step.publish()
