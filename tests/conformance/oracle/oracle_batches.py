"""Random batches for the oracles: ragged rows, masked tool tokens, lone rows, groups of equal scores, log-probs far
from the policy that sampled; padded as the oracles want them, and flat as ours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SEEDS = range(6)
VOCAB = 7


@dataclass(frozen=True)
class Padded:
    """`wild` batches also have a row that trains nothing and log-ratios beyond every bound."""

    arrays: dict[str, np.ndarray]
    wild: bool

    @property
    def mask_BL(self) -> np.ndarray:
        return self.arrays["mask"].astype(bool)

    @property
    def row_T(self) -> np.ndarray:
        return np.nonzero(self.mask_BL)[0]

    @property
    def trained_R(self) -> np.ndarray:
        return self.mask_BL.sum(1)

    def flat(self, name: str) -> np.ndarray:
        return self.arrays[name][self.mask_BL]


def random_batch(seed: int) -> Padded:
    rng = np.random.default_rng(seed)
    wild = seed >= 4
    rows, length = 14, 18
    mask = _mask(rng, rows, length, wild)
    new = -rng.gamma(2.0, 0.7, (rows, length))
    old = np.minimum(new + 0.5 * rng.normal(size=new.shape), -1e-3)
    if wild:
        old[1, :3] = new[1, :3] + (30, -30, 12)
    group = np.array([0] * 4 + [1] * 4 + [2] + [3] * 4 + [4])  # two lone rows
    score = rng.normal(size=rows)
    score[group == 1] = 0.7  # no variance
    token_reward = np.zeros_like(new)
    for row in np.flatnonzero(mask.any(1)):
        token_reward[row, np.flatnonzero(mask[row])[-1]] = score[row]
    value = rng.normal(size=new.shape)
    arrays = {
        "mask": mask.astype(np.float64), "new": new, "old": old, "group": group, "token_reward": token_reward,
        "behaviour": old + 0.4 * rng.normal(size=new.shape), "reference": new + 0.5 * rng.normal(size=new.shape),
        "advantage": np.where(rng.random(new.shape) < 0.1, 0.0, rng.normal(size=new.shape)),
        "row_advantage": np.repeat(rng.normal(size=(rows, 1)), length, axis=1),
        "old_value": value, "value": value + 0.6 * rng.normal(size=new.shape), "return": rng.normal(size=new.shape),
        "entropy": rng.random(new.shape), "logits": rng.normal(size=(*new.shape, VOCAB)),
        "even_score": np.vstack([rng.normal(size=(3, 4)), np.full((1, 4), 0.3)])[:, : 1 if seed == 1 else 4],
    }  # fmt: skip
    return Padded(arrays, wild)


def _mask(rng: np.random.Generator, rows: int, length: int, wild: bool) -> np.ndarray:
    """Answers with holes, of many lengths, the first of full length."""
    ends = rng.integers(1, length + 1, rows)
    ends[:2] = length
    mask = (np.arange(length) < ends[:, None]) & (rng.random((rows, length)) < 0.7)
    mask[:, 0] = True
    mask[0, -1] = mask[1, :3] = True
    if wild:
        mask[2] = False
    return mask
