"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc


def keep_what_is_there() -> None:
    """Exclude all present objects from later collections. Call once, when a process is ready: modules, models and
    templates stay, and every full collection would delay all calls, or a step, to visit them again."""
    gc.collect()
    gc.freeze()
