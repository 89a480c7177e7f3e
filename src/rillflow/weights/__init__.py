"""Weights on disk and in memory: immutable versions of a policy, their transport to nodes, and loading models.

manifest     what a store's files say: manifests, the line, signatures; the cheapest chain to a version; sources
sealed       folders whose files appear together, by one rename
codec        tensors to bytes and back, shared tensors once; low-rank adapters
delta        bit-exact deltas of tensors; fingerprint: sums that follow a change
store        the weight store that a trainer writes; folder: as its readers see it; previous: the last version
pull         from the weights that a node holds to the newest; node_weights: a node's copy; refresh: engines on the head
probe        log-probs that an engine must reproduce before it serves a version
updates      which engines update when, and what a joining process must know
transport    files over HTTP, relays and object stores
models       loads policies, for trainers and engines, so version 0 is the same for all; exports Hugging Face folders
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rillflow.weights.manifest import Line

if TYPE_CHECKING:
    from rillflow.weights.store import FolderStore

__all__ = ["FolderStore", "Line"]


def __getattr__(name: str) -> Any:
    """Import the store lazily: it needs torch, which servers and relays of weights do not."""
    if name != "FolderStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rillflow.weights.store import FolderStore

    return FolderStore
