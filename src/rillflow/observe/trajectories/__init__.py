"""Kept trajectories, shown to people. What is stored, and the reader of it: `rillflow.storage.trajectories`."""

from rillflow.observe.trajectories.texts import token_texts

__all__ = ["token_texts"]
