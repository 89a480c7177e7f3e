"""A kept trajectory: what an episode said and did, with its tokens, for people to look at.

A trajectory is one row of numbers and names (`TrajectoryInfo`), by which it is found and sorted, and one compressed
body with the rest. Arrays are little-endian bytes, as in storage units; a body that cannot be decoded is CorruptData.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rillflow.errors import CorruptData

FILE = "trajectories.sqlite"  # in a run's folder
KINDS = ("sample", "best", "worst", "failure", "evaluation")

Lane = Literal["train", "evaluation"]
Status = Literal["done", "failed"]
Kept = Literal["sample", "best", "worst", "failure", "evaluation"]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

MOST_RAW = 512 << 20  # bytes of a body before it is compressed
_LEVEL = 3
_Number = TypeVar("_Number", bound=np.generic)


class TrajectoryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers and names of a trajectory.

    `id` is its task's id; of a failure its attempt's, since a task may fail several times. `cause` says how it failed,
    or how it ended where it has a reward without an answer. `kept` says why it was kept. `step` is the optimizer step
    that trained on it, or at which an evaluation was asked for. `policy` is the first of `policies`; `roles` are the
    agents that its calls named. `tokens` and `trained` are sums over its samples, `oldest` and `newest` the versions of
    the trained tokens. `advantage` is the mean over the trained tokens, `gap` their mean distance between the log-probs
    of trainer and engine; both None where no trainer reported them.
    """

    id: str
    time: float
    lane: Lane
    status: Status
    cause: str = ""
    kept: Kept
    step: int | None = None
    policy: str = ""
    policies: list[str] = []
    roles: list[str] = []
    prompt: str = ""
    source: str = ""
    group: str = ""
    place: int = 0
    reward: float | None = None
    tokens: int = 0
    trained: int = 0
    samples: int = 0
    calls: int = 0
    forks: int = 0
    oldest: int | None = None
    newest: int | None = None
    truncated: bool = False
    advantage: float | None = None
    gap: float | None = None
    seconds: float = 0.0
    node: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TokenPath:
    """The tokens of one sample: a root-to-leaf path of an episode's token tree. All arrays have its length.

    `mask` is 1 where a token was sampled and trains here; `logprobs` and `versions` are the engine's for those (0 and
    -1 elsewhere). The log-prob is of the distribution that the trainer computes: at the temperature of the call, or
    untempered where no temperature alone explains it (greedy, top-p, top-k). `advantages` and `trainer_logprobs` are
    those of the first update that the sample had part in, by the weights before it; they are NaN for tokens that the
    trainer did not report. `path` is the number of its conversation among the trajectory's `paths`, if that is known;
    `fork` says why it left another path.
    """

    policy: str
    role: str
    reward: float
    fork: str
    truncated: bool
    path: int | None
    tokens: Ints
    mask: npt.NDArray[np.uint8]
    logprobs: Floats
    versions: Ints
    advantages: Floats | None = None
    trainer_logprobs: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One kept episode: its prompt, its conversations, its rewards and its samples.

    `paths` are the entries of its transcript (`gateway.trees.record.transcript`), `rewards` the parts of its reward and
    its metrics, `error` the message of a failure, with the traceback of user code.

    Example:

        for trajectory in rillflow.trajectories("runs/quickstart-20261118-033123"):
            print(trajectory.info.reward, trajectory.messages()[-1]["content"])
    """

    info: TrajectoryInfo
    payload: Mapping[str, Any] = field(default_factory=dict)
    paths: Sequence[Mapping[str, Any]] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    samples: Sequence[TokenPath] = ()

    def messages(self, path: int = -1) -> list[dict[str, Any]]:
        """Return the whole conversation of one of `paths`, from its first message; an empty list without paths."""
        return conversation(self.paths, path) if self.paths else []


def conversation(paths: Sequence[Mapping[str, Any]], number: int = -1) -> list[dict[str, Any]]:
    """Return all messages of a transcript's entry, with those that it shares with an earlier one."""
    entry = paths[number]
    own = [dict(message) for message in entry["messages"]]
    if entry.get("follows") is None:
        return own
    same = [n for n, other in enumerate(paths) if other["policy"] == entry["policy"]]
    return conversation(paths, same[entry["follows"]])[: entry["shared"]] + own


def described(samples: Sequence[TokenPath], **known: Any) -> TrajectoryInfo:
    """Return the info of a trajectory of these samples; `known` is what they do not tell."""
    policies = list(dict.fromkeys(sample.policy for sample in samples))
    versions = np.concatenate([sample.versions[sample.mask == 1] for sample in samples] or [np.empty(0, np.int32)])
    oldest, newest = (int(versions.min()), int(versions.max())) if len(versions) else (None, None)
    return TrajectoryInfo(
        policy=next(iter(policies), ""),
        policies=policies,
        roles=sorted({sample.role for sample in samples if sample.role}),
        tokens=sum(len(sample.tokens) for sample in samples),
        trained=sum(int(sample.mask.sum()) for sample in samples),
        samples=len(samples),
        forks=sum(bool(sample.fork) for sample in samples),
        oldest=oldest,
        newest=newest,
        truncated=any(sample.truncated for sample in samples),
        advantage=_mean(sample.advantages[sample.mask == 1] for sample in samples if sample.advantages is not None),
        gap=_mean(
            np.abs(sample.trainer_logprobs - sample.logprobs)[sample.mask == 1]
            for sample in samples
            if sample.trainer_logprobs is not None
        ),
        **known,
    )


def _mean(parts: Iterable[Floats]) -> float | None:
    """Return the mean of all that are numbers, None where none is."""
    values = np.concatenate([*parts, np.empty(0, np.float32)])
    values = values[np.isfinite(values)]
    return float(values.mean(dtype=np.float64)) if len(values) else None


# ------------------------------------------------------------ bodies


class _Path(msgspec.Struct):
    policy: str
    role: str
    reward: float
    fork: str
    truncated: bool
    path: int | None
    tokens: bytes
    mask: bytes
    logprobs: bytes
    versions: bytes
    advantages: bytes | None
    trainer_logprobs: bytes | None


class _Body(msgspec.Struct):
    payload: bytes  # JSON, as are the paths
    paths: bytes
    rewards: dict[str, float]
    error: str
    samples: list[_Path]


def encode_body(trajectory: Trajectory) -> bytes:
    """Return all of a trajectory but its info."""
    body = _Body(
        payload=json.dumps(trajectory.payload, default=str).encode(),
        paths=json.dumps(trajectory.paths, default=str).encode(),
        rewards=dict(trajectory.rewards),
        error=trajectory.error,
        samples=[_packed(sample) for sample in trajectory.samples],
    )
    return zlib.compress(msgspec.msgpack.encode(body), _LEVEL)


def decode_body(info: TrajectoryInfo, body: bytes) -> Trajectory:
    try:
        found = msgspec.msgpack.decode(_inflated(body), type=_Body)
        return Trajectory(
            info=info,
            payload=json.loads(found.payload),
            paths=json.loads(found.paths),
            rewards=found.rewards,
            error=found.error,
            samples=[_unpacked(sample) for sample in found.samples],
        )
    except (zlib.error, ValueError) as error:  # what msgspec and json raise are ValueErrors
        raise CorruptData(f"trajectory {info.id} cannot be read: {error}", "the others can be") from error


def _inflated(body: bytes) -> bytes:
    stream = zlib.decompressobj()
    raw = stream.decompress(body, MOST_RAW)
    if not stream.eof:
        raise ValueError("its body is cut, or larger than any that is written")
    return raw


def _packed(sample: TokenPath) -> _Path:
    return _Path(
        policy=sample.policy,
        role=sample.role,
        reward=sample.reward,
        fork=sample.fork,
        truncated=sample.truncated,
        path=sample.path,
        tokens=_bytes(sample.tokens, "<i4"),
        mask=_bytes(sample.mask, "|u1"),
        logprobs=_bytes(sample.logprobs, "<f4"),
        versions=_bytes(sample.versions, "<i4"),
        advantages=None if sample.advantages is None else _bytes(sample.advantages, "<f4"),
        trainer_logprobs=None if sample.trainer_logprobs is None else _bytes(sample.trainer_logprobs, "<f4"),
    )


def _bytes(array: npt.NDArray[_Number], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _unpacked(sample: _Path) -> TokenPath:
    tokens = np.frombuffer(sample.tokens, "<i4")

    def floats(data: bytes) -> Floats:
        return _of_length(np.frombuffer(data, "<f4"), len(tokens))

    return TokenPath(
        policy=sample.policy,
        role=sample.role,
        reward=sample.reward,
        fork=sample.fork,
        truncated=sample.truncated,
        path=sample.path,
        tokens=tokens,
        mask=_of_length(np.frombuffer(sample.mask, "|u1"), len(tokens)),
        logprobs=floats(sample.logprobs),
        versions=_of_length(np.frombuffer(sample.versions, "<i4"), len(tokens)),
        advantages=None if sample.advantages is None else floats(sample.advantages),
        trainer_logprobs=None if sample.trainer_logprobs is None else floats(sample.trainer_logprobs),
    )


def _of_length(array: npt.NDArray[_Number], length: int) -> npt.NDArray[_Number]:
    if len(array) != length:
        raise ValueError(f"a column has {len(array)} values for {length} tokens")
    return array
