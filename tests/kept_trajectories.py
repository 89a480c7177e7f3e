"""Trajectories made up for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from rillflow.storage.trajectory_format import TokenPath, Trajectory, described


def token_path(length: int = 6, *, prompt: int = 2, policy: str = "policy", seed: int = 0, **others: Any) -> TokenPath:
    """Return a path of random tokens, all trained but the first ones."""
    random = np.random.default_rng(seed)
    mask = np.ones(length, np.uint8)
    mask[:prompt] = 0
    known: dict[str, Any] = {
        "policy": policy,
        "role": "",
        "reward": 1.0,
        "fork": "",
        "truncated": False,
        "path": 0,
        "tokens": random.integers(0, 500, length, np.int32),
        "mask": mask,
        "logprobs": np.where(mask, -random.random(length), 0).astype(np.float32),
        "versions": np.where(mask, 3, -1).astype(np.int32),
    }
    return TokenPath(**known | others)


def trajectory(
    name: str = "g0.0", *, samples: list[TokenPath] | None = None, text: str = "Blue.", **info: Any
) -> Trajectory:
    """Return a trajectory of one question and its answer."""
    known: dict[str, Any] = {
        "id": name,
        "time": 1.0,
        "lane": "train",
        "status": "done",
        "kept": "sample",
        "reward": 1.0,
    }
    question = {"role": "user", "content": "What colour is the sky?"}
    answer = {"role": "assistant", "content": text}
    path = {
        "policy": "policy",
        "follows": None,
        "shared": 0,
        "fork": "",
        "finish": "stop",
        "messages": [question, answer],
    }
    made = [token_path()] if samples is None else samples
    info = described(made, **{"calls": 1, "seconds": 0.5, **known, **info})
    return Trajectory(info, payload={"question": "sky"}, paths=[path], rewards={"format": 1.0}, samples=made)
