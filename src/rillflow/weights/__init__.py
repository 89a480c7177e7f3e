"""Weights on disk and in memory: immutable versions of a policy (`store`), sealed folders, and loading models.

`models` is the one place through which trainers and engines load a policy, so that version 0 is the same for all.
"""

from rillflow.weights.manifest import Line
from rillflow.weights.store import FolderStore

__all__ = ["FolderStore", "Line"]
