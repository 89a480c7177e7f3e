"""Python's collector in a process that serves."""

from __future__ import annotations

import gc


def keep_what_is_there() -> None:
    """Call once, when a process is ready: modules, models and templates stay, and every full collection would hold up
    all calls, or a step, to look at them again."""
    gc.collect()
    gc.freeze()
