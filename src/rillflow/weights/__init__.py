"""Weights on disk and in memory: immutable versions of a policy (`store`), sealed folders, and loading models.

`models` is the one place through which trainers and engines load a policy, so that version 0 is the same for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rillflow.weights.manifest import Line

if TYPE_CHECKING:
    from rillflow.weights.store import FolderStore

__all__ = ["FolderStore", "Line"]


def __getattr__(name: str) -> Any:
    """Import the store when it is asked for: it needs torch, which servers and relays of weights do not."""
    if name != "FolderStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rillflow.weights.store import FolderStore

    return FolderStore
