"""A trainer that takes as long for a step as one on a device of its own would.

`bench.staleness` adds this node to every arm's step graph. It sleeps, so it takes no processor time from the nodes that
sample. If a step takes longer than the sampling of a batch, the batches that the staleness bound allows are all under
way, and samples are as old as the bound when they are trained.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rillflow.trainer.graph import function

if TYPE_CHECKING:
    from rillflow.trainer.batches import Databuffer
    from rillflow.trainer.graph.worker import Step

_CHECK_EVERY = 0.1  # seconds between two looks at whether the step is to be abandoned


@function("pace", role="reward", kind="compute", needs=["reward_R"], gives=["paced_R"], scope="batch")
def pace(step: Step, data: Databuffer, seconds: float = 1.0) -> dict[str, Any]:
    """Sleep for `seconds`."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        step.check()
        time.sleep(min(left, _CHECK_EVERY))
    return {"paced_R": 0.0 * data["reward_R"]}
