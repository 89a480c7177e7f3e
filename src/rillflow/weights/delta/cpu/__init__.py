"""Deltas on the host: compiled loops over segments. `delta.file` is their face."""
