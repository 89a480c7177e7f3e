"""A leased batch as flat arrays (`Rows`), and the databuffers that carry it between the nodes of a step.

`make_rows` checks the payload of each sample against the ledger's metadata. A `Databuffer` holds the rows of this rank
and the columns that nodes or stages added. A column's name says its length: `…_R` has one value for each row, `…_N` one
for each token, row after row. A storage unit appends the dtype to the name of a stage's column: `reference_N.f4`.

Invariants: rows keep the order of the batch; a payload that does not fit its metadata raises DamagedRows, so only what
the engine sampled reaches a step; every column has the length that its name says; a databuffer is immutable, and its
rows and columns stay together however they are split, joined or sent to other ranks; a stage's column that has another
length or a value that is not finite is damaged, and its stage makes it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rillflow.clients.payloads import DamagedRows
from rillflow.config import StageConfig, TrainerConfig, resolve_object
from rillflow.engine.experts import UNKNOWN, unpack
from rillflow.errors import ConfigError, CorruptData, GraphError, did_you_mean
from rillflow.types import COLUMNS, BatchSample

if TYPE_CHECKING:
    import numpy.typing as npt

    Arrays = Mapping[str, npt.NDArray[Any]]
    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]
    Column = npt.NDArray[Any]


TRAINED_COLUMNS = ("tokens", "mask", "logprobs", "raw_logprobs", "temperatures", "versions")
_KEY_BITS = 20  # for each part of a sample's key


@dataclass(frozen=True)
class Rows:
    """A batch, or a part of one, in memory. Row r is `[start_R[r], start_R[r] + length_R[r])` of the arrays over N.

    `old_N` are log-probs at `temperature_N`. Tokens that a temperature alone does not explain (greedy, top-p, top-k)
    are scored under the untempered distribution, on both sides of the ratio. `fresh_N` marks tokens that the trainer's
    current version sampled: their log-probs differ from the trainer's by the computation alone.

    `member_R` is the place of the row's group in the batch, across parts and ranks. Rows of a group with the same
    `alike_R` are compared with each other. `step_reward_N` is the reward of the answer that ends with a token, else
    NaN. `kept_R` is the row's key if its episode may be kept for people (`sample_key`), else 0.
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
        """Return the number of trained tokens of each row."""
        return np.add.reduceat(self.mask_N, self.start_R, dtype=np.int64)

    def masked(self, keep_R: Flags) -> Rows:
        """Return the same batch in which only the kept rows train."""
        return replace(self, mask_N=self.mask_N & np.repeat(keep_R, self.length_R))


def make_rows(
    samples: Sequence[BatchSample],
    payload: Sequence[Arrays],
    policy: str = "",
    version: int = -1,
    keep: Collection[str] = (),
) -> Rows:
    """Build the rows of `samples`, whose columns are in `payload`, and check them.

    The trainer is at `version` of `policy` (-1: unknown). `keep` are the tasks whose episodes may be kept.
    """
    if not samples or len(samples) != len(payload):
        raise CorruptData(f"read {len(payload)} rows for {len(samples)} samples", "the batch is damaged")
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
        kept_R=np.array([sample_key(sample) if sample.task in keep else 0 for sample in samples], dtype=np.int64),
    )
    _check(rows, samples)
    return rows


def columns_of(config: TrainerConfig) -> tuple[str, ...]:
    """Return the payload columns that a trainer reads."""
    more = [name for name, wanted in (("rewards", config.by_steps), ("experts", config.replay_routing)) if wanted]
    return (*TRAINED_COLUMNS, *more)


def sample_key(sample: BatchSample) -> int:
    """Return the number of a sample in its batch, above 0, or 0 if one of its parts is too large.

    As one number it travels with its row through packing and between ranks. `split_key` is the inverse.
    """
    _, place, number = sample.id.rsplit(".", 2)
    if max(int(place), int(number)) >> _KEY_BITS or sample.member >> _KEY_BITS:
        return 0
    return 1 + (sample.member << 2 * _KEY_BITS | int(place) << _KEY_BITS | int(number))


def split_key(key: int) -> tuple[int, int, int]:
    """Return the group's place in the batch, the task's place in the group and the sample's number in the task."""
    low = (1 << _KEY_BITS) - 1
    return key - 1 >> 2 * _KEY_BITS, key - 1 >> _KEY_BITS & low, key - 1 & low


def no_rows() -> Rows:
    """Return the rows of a rank that has none."""
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
    """Return which tokens the trainer's current version sampled. Version numbers count for their own policy only."""
    fresh_N: Flags = own_N & (columns["mask"] != 0) & (columns["versions"] == version)
    return fresh_N


def _step_rewards(payload: Sequence[Arrays], length_R: Ints, samples: Sequence[BatchSample]) -> npt.NDArray[np.float32]:
    """Return the rewards of answers. A row without such rewards has no column of them."""
    none = [np.full(length, np.nan, np.float32) for length in length_R.tolist()]
    given = [{"rewards": row.get("rewards", missing)} for row, missing in zip(payload, none, strict=True)]
    reward_N = _column("rewards", given, length_R, samples)
    at_R = np.logical_or.reduceat(np.isinf(reward_N), np.cumsum(length_R) - length_R)
    _refuse(at_R, samples, "the reward of one of its answers is not finite")
    return reward_N


def _column(name: str, payload: Sequence[Arrays], length_R: Ints, samples: Sequence[BatchSample]) -> npt.NDArray[Any]:
    """Return one column of all rows, row after row."""
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


# ---------------------------------------------------------------- rows with the columns that nodes make


# The columns that every source of rows gives. `start_R` follows from `length_R`.
FETCHED = tuple(column.name for column in fields(Rows) if column.name != "start_R")


@dataclass(frozen=True)
class Databuffer:
    """Rows, and in `made` the columns that are not in `rows`. A node that makes a column of `rows` replaces it
    there."""

    rows: Rows
    made: Mapping[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows.length_R)

    def __contains__(self, name: str) -> bool:
        return name in self.made or name in FETCHED

    def __getitem__(self, name: str) -> Column:
        if name in self.made:
            return self.made[name]
        if name not in FETCHED:
            raise GraphError(f"unknown column {name}", f"known columns: {', '.join(self.names)}")
        column: Column = getattr(self.rows, name)
        return column

    @property
    def names(self) -> list[str]:
        return [*FETCHED, *self.made]

    @property
    def row_N(self) -> Ints:
        """Return the row of each token."""
        return np.repeat(np.arange(len(self)), self.rows.length_R)

    def adding(self, columns: Mapping[str, Column]) -> Databuffer:
        """Return a databuffer with these columns, which replace columns of the same name."""
        for name, column in columns.items():
            _check_column(name, column, self.rows)
        fetched = {name: column for name, column in columns.items() if name in FETCHED}
        made = {name: column for name, column in columns.items() if name not in FETCHED}
        return Databuffer(replace(self.rows, **fetched) if fetched else self.rows, {**self.made, **made})

    def taking(self, index_R: Ints) -> Databuffer:
        """Return these rows, in this order."""
        length_R = self.rows.length_R[index_R]
        within_N = np.arange(int(length_R.sum())) - np.repeat(np.cumsum(length_R) - length_R, length_R)
        index_N = np.repeat(self.rows.start_R[index_R], length_R) + within_N
        picked = {name: self[name][index_N if name.endswith("_N") else index_R] for name in self.names}
        return from_columns(picked)


Part = Rows | Databuffer  # one part of a batch, as the stream serves it: without columns of stages, or with them


def from_columns(columns: Mapping[str, Column]) -> Databuffer:
    """Build a databuffer from its columns, which must include all of FETCHED."""
    length_R = columns["length_R"]
    rows = Rows(start_R=np.cumsum(length_R) - length_R, **{name: columns[name] for name in FETCHED})
    return Databuffer(rows, {name: column for name, column in columns.items() if name not in FETCHED})


def joined(parts: Sequence[Databuffer]) -> Databuffer:
    """Return all rows, in the order of the parts, which must have the same columns."""
    if len(parts) == 1:
        return parts[0]
    return from_columns({name: concatenated(name, [part[name] for part in parts]) for name in parts[0].names})


def concatenated(name: str, columns: Sequence[Column]) -> Column:
    """Return a column of several parts. Of experts, a part in which none were recorded may be narrower."""
    if name == EXPERTS:
        width = max(column.dtype.itemsize for column in columns)
        columns = [column if column.dtype.itemsize == width else _unknown(len(column), width) for column in columns]
    return np.concatenate(columns)


def _check_column(name: str, column: Column, rows: Rows) -> None:
    if not name.endswith(("_R", "_N")):
        raise GraphError(f"column {name} must end in _R (rows) or _N (tokens)", "rename it")
    size = len(rows.length_R) if name.endswith("_R") else len(rows.tokens_N)
    if np.shape(column) != (size,):
        what = "rows" if name.endswith("_R") else "tokens"
        raise GraphError(f"column {name} has shape {np.shape(column)}", f"there are {size} {what}: one value for each")


# ---------------------------------------------------------------- experts that engines chose


EXPERTS = "experts_N"  # a record of bytes for each token: its experts, in 16 bits each
_NARROWEST = 2  # bytes


def with_experts(data: Databuffer, samples: Sequence[BatchSample], payload: Sequence[Arrays]) -> Databuffer:
    """Add the experts that were recorded for each token, unknown ones where a sample has none."""
    parts = [_experts_of_row(arrays, sample) for arrays, sample in zip(payload, samples, strict=True)]
    width = max((part.shape[1] for part in parts if part is not None), default=1)
    known = [
        _unknown(sample.tokens, 2 * width) if part is None else _records(part)
        for part, sample in zip(parts, samples, strict=True)
    ]
    if any(column.dtype.itemsize != 2 * width for column in known):
        raise CorruptData("samples have choices of different numbers of experts", "one policy has one model")
    return data.adding({EXPERTS: np.concatenate(known)})


def _experts_of_row(arrays: Arrays, sample: BatchSample) -> npt.NDArray[np.uint16] | None:
    if "experts" not in arrays or not len(arrays["experts"]):
        return None
    try:
        found = unpack(arrays["experts"].tobytes())
    except CorruptData as error:
        raise DamagedRows([sample.row], error) from error
    if len(found) != sample.tokens:
        raise DamagedRows([sample.row], CorruptData(f"sample {sample.id}: experts of {len(found)} tokens", "damaged"))
    return found


def _records(choice_NW: npt.NDArray[np.uint16]) -> Column:
    return np.ascontiguousarray(choice_NW.astype("<u2")).view(f"V{2 * choice_NW.shape[1]}")[:, 0]


def _unknown(count: int, width: int) -> Column:
    return np.frombuffer(b"\xff" * (count * width), f"V{width}")


def experts_of(data: Databuffer, index_P: Ints) -> Ints | None:
    """Return the experts of these tokens, -1 where unknown; None if none were recorded."""
    if EXPERTS not in data.made or data[EXPERTS].dtype.itemsize == _NARROWEST:
        return None
    chosen_P = np.ascontiguousarray(data[EXPERTS][index_P])
    chosen_PW: Ints = np.frombuffer(chosen_P.tobytes(), "<u2").reshape(len(index_P), -1).astype(np.int64)
    return np.where(chosen_PW == UNKNOWN, -1, chosen_PW)


# ---------------------------------------------------------------- columns that stages add


REFERENCE, SCORE = "reference_N", "score_R"
# The columns of the shipped kinds (`rillflow.stages`).
GIVES = {"reference": (REFERENCE,), "reward_model": (SCORE,)}
_DTYPE = "f4"


def columns_of_stage(name: str, config: StageConfig) -> tuple[str, ...]:
    """Return the columns that a stage adds to a sample. A user's class declares them as `gives`."""
    if config.kind in GIVES:
        return GIVES[config.kind]
    if ":" not in config.kind:
        raise ConfigError(
            f"stage {name} has the unknown kind {config.kind!r}",
            f"{did_you_mean(config.kind, GIVES)}one of: {', '.join(GIVES)}; or module:Class, file.py:Class",
        )
    gives = getattr(resolve_object(config.kind), "gives", ())
    if not gives or isinstance(gives, str) or not all(column.endswith(("_R", "_N")) for column in gives):
        raise ConfigError(
            f"stage {name}: {config.kind} does not declare which columns it writes",
            'give the class `gives = ("novelty_R",)`: names that end in _R (one value a sample) or _N (one a token)',
        )
    return tuple(gives)


def staged_columns(stages: Mapping[str, StageConfig]) -> dict[str, str]:
    """Return the columns that the stages of a policy add, each with the name of its stage."""
    found: dict[str, str] = {}
    for name, config in stages.items():
        for column in columns_of_stage(name, config):
            if column in FETCHED:
                raise ConfigError(f"stage {name} writes {column}, which every sample has", "give it another name")
            if column in found:
                raise ConfigError(f"stages {found[column]} and {name} both write {column}", "remove one of them")
            found[column] = name
    return found


def payload_name(column: str) -> str:
    """Return the name of a column in a storage unit."""
    return f"{column}.{_DTYPE}"


def with_staged(
    rows: Rows, samples: Sequence[BatchSample], payload: Sequence[Arrays], columns: Iterable[str]
) -> Databuffer:
    """Return the rows with the columns of stages. DamagedRows names the rows whose columns do not fit."""
    return Databuffer(rows, {name: _staged_column(name, rows, samples, payload) for name in columns})


def nothing_staged(columns: Iterable[str], *, experts: bool = False) -> Databuffer:
    """Return the databuffer of a rank that has no rows."""
    data = Databuffer(no_rows(), {name: np.empty(0, np.float32) for name in columns})
    return data.adding({EXPERTS: _unknown(0, _NARROWEST)}) if experts else data


def _staged_column(name: str, rows: Rows, samples: Sequence[BatchSample], payload: Sequence[Arrays]) -> Column:
    missing = np.empty(0, np.float32)
    parts = [arrays.get(payload_name(name), missing) for arrays in payload]
    wanted_R = rows.length_R if name.endswith("_N") else np.ones_like(rows.length_R)
    bad = [
        sample
        for sample, part, wanted in zip(samples, parts, wanted_R.tolist(), strict=True)
        if len(part) != wanted or not np.isfinite(part).all()
    ]
    if bad:
        first = CorruptData(f"sample {bad[0].id}: column {name} of a stage is missing or damaged", "it is made again")
        raise DamagedRows([row for sample in bad for row in sample.extra or [sample.row]], first)
    return np.concatenate(parts)
