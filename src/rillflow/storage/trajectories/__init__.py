"""Trajectories that a run keeps for people: their format, the bounded file that holds them, and its reader."""

from rillflow.storage.trajectories.format import (
    FILE,
    KINDS,
    TokenPath,
    Trajectory,
    TrajectoryInfo,
    conversation,
    decode_body,
    described,
    encode_body,
)
from rillflow.storage.trajectories.store import LEAST_BYTES, Bounds, Trajectories, TrajectoryStore

__all__ = [
    "FILE",
    "KINDS",
    "LEAST_BYTES",
    "Bounds",
    "TokenPath",
    "Trajectories",
    "Trajectory",
    "TrajectoryInfo",
    "TrajectoryStore",
    "conversation",
    "decode_body",
    "described",
    "encode_body",
]
