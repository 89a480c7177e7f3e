"""Kept trajectories, shown to people. What is stored, and the reader of it: `rillflow.storage.trajectories`."""
