"""A leased batch and its payload columns become flat arrays, checked against what the ledger says of each sample.

Invariant: rows keep the order of the batch; rows whose payload does not fit their metadata raise DamagedRows, so
nothing that differs from what the engine sampled reaches a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rillflow.clients.payloads import DamagedRows
from rillflow.config import TrainerConfig
from rillflow.errors import CorruptData
from rillflow.trainer.kept import key_of
from rillflow.types import COLUMNS, BatchSample

if TYPE_CHECKING:
    import numpy.typing as npt

    Arrays = Mapping[str, npt.NDArray[Any]]
    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

TRAINED_COLUMNS = ("tokens", "mask", "logprobs", "raw_logprobs", "temperatures", "versions")


@dataclass(frozen=True)
class Rows:
    """A batch, or a part of one, in memory. Row r is `[start_R[r], start_R[r] + length_R[r])` of the arrays over N.

    `old_N` are log-probs at `temperature_N`. Tokens that no temperature alone explains (greedy, top-p, top-k) are
    scored under the untempered distribution, on both sides of the ratio. `fresh_N`: sampled by the very version that
    the trainer is at, so that its log-probs differ from the trainer's by how they are computed alone.

    `member_R` is the place of the row's group in the batch, whatever its part and rank, and rows of it with the same
    `alike_R` are compared with each other; `step_reward_N` is the reward of the answer that ends with a token, else
    NaN. `kept_R` names the row where its episode may be kept for people, else it is 0 (`trainer.kept`).
    """

    tokens_N: npt.NDArray[np.int32]
    mask_N: Flags
    old_N: npt.NDArray[np.float32]
    temperature_N: npt.NDArray[np.float32]
    fresh_N: Flags
    start_R: Ints
    length_R: Ints
    reward_R: Floats
    group_mean_R: Floats
    group_std_R: Floats
    group_size_R: Ints
    staleness_R: Ints
    truncated_R: Flags
    replayed_R: Flags
    member_R: Ints
    alike_R: Ints
    step_reward_N: npt.NDArray[np.float32]
    kept_R: Ints

    @property
    def trained_R(self) -> Ints:
        """How many tokens of each row are trained."""
        return np.add.reduceat(self.mask_N, self.start_R, dtype=np.int64)

    def masked(self, keep_R: Flags) -> Rows:
        """The same batch, of which only the kept rows train."""
        return replace(self, mask_N=self.mask_N & np.repeat(keep_R, self.length_R))


def make_rows(
    samples: Sequence[BatchSample],
    payload: Sequence[Arrays],
    policy: str = "",
    version: int = -1,
    keep: Collection[str] = (),
) -> Rows:
    """`payload[i]` holds the columns of `samples[i]`; the trainer is at `version` of `policy` (-1: at none). `keep` are
    the tasks that may be kept."""
    if not samples or len(samples) != len(payload):
        raise CorruptData(f"{len(payload)} rows were read for {len(samples)} samples", "the batch is damaged")
    length_R = np.array([sample.tokens for sample in samples], dtype=np.int64)
    columns = {name: _column(name, payload, length_R, samples) for name in TRAINED_COLUMNS}
    tempered_N = columns["temperatures"] > 0
    rows = Rows(
        tokens_N=columns["tokens"],
        mask_N=columns["mask"] != 0,
        old_N=np.where(tempered_N, columns["logprobs"], columns["raw_logprobs"]),
        temperature_N=np.where(tempered_N, columns["temperatures"], np.float32(1.0)),
        fresh_N=_fresh(columns, np.repeat([sample.policy == policy for sample in samples], length_R), version),
        start_R=np.cumsum(length_R) - length_R,
        length_R=length_R,
        reward_R=np.array([sample.reward for sample in samples]),
        group_mean_R=np.array([sample.group_mean for sample in samples]),
        group_std_R=np.array([sample.group_std for sample in samples]),
        group_size_R=np.array([sample.group_size for sample in samples], dtype=np.int64),
        staleness_R=np.array([sample.staleness for sample in samples], dtype=np.int64),
        truncated_R=np.array([sample.truncated for sample in samples], dtype=np.bool_),
        replayed_R=np.array([sample.replayed for sample in samples], dtype=np.bool_),
        member_R=np.array([sample.member for sample in samples], dtype=np.int64),
        alike_R=np.array([sample.alike for sample in samples], dtype=np.int64),
        step_reward_N=_step_rewards(payload, length_R, samples),
        kept_R=np.array([key_of(sample) if sample.task in keep else 0 for sample in samples], dtype=np.int64),
    )
    _check(rows, samples)
    return rows


def columns_of(config: TrainerConfig) -> tuple[str, ...]:
    """What a trainer reads of each row."""
    return (*TRAINED_COLUMNS, "rewards") if config.by_steps else TRAINED_COLUMNS


def no_rows() -> Rows:
    """The share of a rank that has none."""
    ints, flags, floats = np.empty(0, np.int64), np.empty(0, np.bool_), np.empty(0)
    return Rows(
        tokens_N=np.empty(0, np.int32),
        mask_N=flags,
        old_N=np.empty(0, np.float32),
        temperature_N=np.empty(0, np.float32),
        fresh_N=flags,
        start_R=ints,
        length_R=ints,
        reward_R=floats,
        group_mean_R=floats,
        group_std_R=floats,
        group_size_R=ints,
        staleness_R=ints,
        truncated_R=flags,
        replayed_R=flags,
        member_R=ints,
        alike_R=ints,
        step_reward_N=np.empty(0, np.float32),
        kept_R=ints,
    )


def _fresh(columns: Arrays, own_N: Flags, version: int) -> Flags:
    """Versions count for their own policy; a number that a dead line of weights had is not the trainer's."""
    fresh_N: Flags = own_N & (columns["mask"] != 0) & (columns["versions"] == version)
    return fresh_N


def _step_rewards(payload: Sequence[Arrays], length_R: Ints, samples: Sequence[BatchSample]) -> npt.NDArray[np.float32]:
    """A row whose answers have no rewards of their own has no such column."""
    none = [np.full(length, np.nan, np.float32) for length in length_R.tolist()]
    given = [{"rewards": row.get("rewards", missing)} for row, missing in zip(payload, none, strict=True)]
    reward_N = _column("rewards", given, length_R, samples)
    at_R = np.logical_or.reduceat(np.isinf(reward_N), np.cumsum(length_R) - length_R)
    _refuse(at_R, samples, "the reward of one of its answers is not finite")
    return reward_N


def _column(name: str, payload: Sequence[Arrays], length_R: Ints, samples: Sequence[BatchSample]) -> npt.NDArray[Any]:
    """One column of all rows, end to end."""
    missing = np.empty(0, COLUMNS[name])
    parts = [row.get(name, missing) for row in payload]
    size_R = np.array([len(part) for part in parts], dtype=np.int64)
    _refuse((size_R != length_R) | (size_R == 0), samples, f"column {name} has another length than the sample")
    return np.concatenate(parts)


def _check(rows: Rows, samples: Sequence[BatchSample]) -> None:
    expected_R = np.array([sample.trained for sample in samples], dtype=np.int64)
    _refuse(rows.trained_R != expected_R, samples, "the mask trains another number of tokens than the sample")
    _refuse(rows.mask_N[rows.start_R], samples, "the first token cannot be trained: nothing comes before it")
    numbers_R = rows.reward_R + rows.group_mean_R + rows.group_std_R
    _refuse(~np.isfinite(numbers_R), samples, "its reward or a statistic of its group is not a number")
    bad_N = ~np.isfinite(rows.old_N) | ~np.isfinite(rows.temperature_N) | (rows.tokens_N < 0)
    _refuse(np.logical_or.reduceat(bad_N, rows.start_R), samples, "a token id or log-prob is not a valid number")


def _refuse(bad_R: Flags, samples: Sequence[BatchSample], what: str) -> None:
    if bad_R.any():
        first = CorruptData(f"sample {samples[int(bad_R.argmax())].id}: {what}", "its row is damaged")
        raise DamagedRows([samples[r].row for r in np.flatnonzero(bad_R).tolist()], first)
