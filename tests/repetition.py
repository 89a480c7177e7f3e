"""How often tests repeat what one example shows: little in the plain run, much in the soak.

`RILLFLOW_TEST_PROFILE=soak` chooses the soak.
"""

from __future__ import annotations

import os

VARIABLE = "RILLFLOW_TEST_PROFILE"
PROFILES = ("plain", "soak")
PROFILE = os.environ.get(VARIABLE) or "plain"

if PROFILE not in PROFILES:
    raise ValueError(f"{VARIABLE} is {PROFILE!r}: set it to one of {', '.join(PROFILES)}")


def times(plain: int, soak: int) -> int:
    """Return how often to repeat."""
    return soak if PROFILE == "soak" else plain
