"""Contracts of the parts of a run: clocks, engines, storage units, weight stores and executors."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from rillflow.types import Chunk, EngineStats, GenerateRequest, KeptTokens, Probe, Row, UnitInfo

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    import torch

    Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
    Tensors = Mapping[str, torch.Tensor]


UNKNOWN = -1  # the version of weights that are not verified


class Change(NamedTuple):
    """New values of some weights of one tensor: `value_K` at the places `index_K` (int64, ascending, each once) of the
    flat tensor; with `index_K` None, of all of them, in order. The values have the tensor's dtype."""

    index_K: torch.Tensor | None
    value_K: torch.Tensor


class Patch(NamedTuple):
    """The changes from version `base` to another version. Tensors that are not named stay as they are. `fingerprints`
    are those of the named tensors afterwards (`weights.fingerprint`)."""

    base: int
    changes: Mapping[str, Change]
    fingerprints: Mapping[str, int]


class Deltas(NamedTuple):
    """Published deltas, still coded, that turn version `base` into another one: the verified files of each step, in
    order. `fingerprints` are those of all tensors of the last version. The files stay until the next pull."""

    base: int
    steps: Sequence[Sequence[Path]]
    fingerprints: Mapping[str, int]


class Clock(Protocol):
    """An injected source of time, so that deadlines can be tested without waiting."""

    def now(self) -> float:
        """Return the seconds since the epoch, for timestamps."""

    def monotonic(self) -> float:
        """Return seconds that never go back, for deadlines."""


class SystemClock:
    """The real clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class TokenSource(Protocol):
    """An engine or a pool of engines, as a gateway uses it. Closing the iterator aborts the request."""

    @property
    def context(self) -> int: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]: ...


class Engine(Protocol):
    """Token ids in; chunks of ids, log-probs and version out.

    A token is sampled by exactly one version. `load` takes effect between two tokens and drops no request:
    running requests go on, their later chunks carrying the new version. `pause` returns once no token is being
    sampled; requests stay and go on after `resume`. Closing the iterator of `generate` aborts the request.

    Weights that come with a probe serve once the engine has reproduced it. Otherwise `load` raises ProbeMismatch, the
    version becomes UNKNOWN, and requests wait until other weights reproduce their probe.
    """

    @property
    def version(self) -> int: ...

    @property
    def proven(self) -> bool:
        """True if it may sample from its weights; false only after `doubt` and after a mismatch."""

    @property
    def context(self) -> int:
        """The most tokens of one sequence, prompt and answer together."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Raises ContextOverflow when the prompt leaves no room for one token, QueueFull at the bound."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    def doubt(self) -> None:
        """From now on, also after a restart, sample only from weights that were loaded or proven."""

    async def prove(self, probe: Probe | None) -> None:
        """Reproduce the probe of the version that is loaded; None if the version has no probe."""

    async def load(self, tensors: Tensors, version: int, probe: Probe | None = None) -> None:
        """Raises WeightsError, changing nothing, when names, shapes or dtypes do not fit."""

    async def patch(self, patch: Patch, version: int, probe: Probe | None = None) -> None:
        """Load weights that differ from the present ones in a few places. Raises WeightsError, changing nothing, if the
        engine does not serve `patch.base` or the weights do not fit."""

    def stats(self) -> EngineStats: ...


@runtime_checkable
class DecodesDeltas(Protocol):
    """An engine that decodes published deltas on the device that holds its weights."""

    @property
    def decoding_refused(self) -> str:
        """Return the reason why it cannot decode, or an empty string."""

    async def apply_deltas(self, deltas: Deltas, version: int, probe: Probe | None = None) -> None:
        """As `Engine.patch`. WeightsError, changing nothing, when it does not serve `deltas.base`, or when it cannot
        decode them."""


Turn = Callable[[], AbstractAsyncContextManager[None]]


@runtime_checkable
class TakesTurns(Protocol):
    """An engine that prepares new weights while it samples. It enters `turn` only to change them, while it samples
    nothing; for any other engine all of an update is such a change."""

    turn: Turn


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that adds a published adapter to the weights that it holds."""

    @property
    def base(self) -> int:
        """Return the version of the weights that it holds, without an adapter; UNKNOWN if they are of none."""

    @property
    def adapters_refused(self) -> str:
        """Return the reason why it takes none, or an empty string."""

    @property
    def adapters_only(self) -> bool:
        """True if it takes no whole weights but those of the base, which other engines use too."""

    async def apply_adapter(self, adapter: Any, base: int, version: int, probe: Probe | None = None) -> None:
        """As `Engine.load`, of an adapter (`weights.codec.Adapter`) of version `base`. WeightsError, changing nothing,
        when it does not hold `base`, or cannot have the adapter."""


class StorageUnit(Protocol):
    """Holds payload columns. A row survives any kill once `put` has returned; a damaged one raises CorruptData.

    Rows lie in numbered segments, so that what is consumed can be dropped many rows at once.
    """

    def put(self, rows: Sequence[Mapping[str, Buffer]]) -> list[Row]: ...

    def get(self, rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, bytes]]:
        """Return the requested columns that each row has."""

    def drop(self, segments: Sequence[int]) -> None:
        """Delete these segments; missing ones are ignored. Their numbers are never used again."""

    def closed(self, segments: Sequence[int]) -> list[int]:
        """Return those of the segments that will never be written again, or no longer exist."""

    def info(self) -> UnitInfo: ...

    def close(self) -> None: ...


class WeightStore(Protocol):
    """Immutable, hashed versions of one policy's weights, and a head that names the live one."""

    def publish(self, tensors: Tensors, version: int, parent: int | None) -> None:
        """All or nothing: readers see the version whole or not at all. A version is never written twice."""

    def head(self) -> int | None: ...

    def versions(self) -> list[int]: ...

    def pull(self, version: int) -> dict[str, torch.Tensor]:
        """Verified against the manifest; raises CorruptData rather than returning something else."""

    def probe(self, version: int) -> Probe | None:
        """Return the probe that an engine must reproduce before it serves the version, or None."""

    def rewind(self, version: int) -> list[int]:
        """Make `version` the head again and mark later versions orphaned; returns them."""


class Trainer(Protocol):
    """Trains one policy on one rank, a step for each batch. All ranks make the same calls in the same order.

    A step abandons its batch if `check` or `parts` raise before its first update: weights and state are then as before.
    `masters`, `moments` and `steps` are all that an exact continuation needs. Weights are valid until the next step.
    """

    steps: int
    generates: bool  # whether its graph asks this trainer's own engine for samples
    kept: list[KeptTokens]  # values of the last step for episodes that the run may keep, of this rank's rows

    def step(self, parts: Iterable[Any], check: Callable[[], None], publish: Callable[[], None]) -> dict[str, float]:
        """Train on one batch, whose parts may still be on their way, call `publish` once with the new weights in place,
        and return metrics."""

    def weights(self, dtype: torch.dtype) -> Tensors:
        """Return whole tensors as engines load them, tied ones under each of their names, at least on rank 0.
        Collective."""

    def shards(self, dtype: torch.dtype) -> Any:
        """Return this rank's part of a sharded model's weights (`parallel.sharding.Shards`), as they are until the next
        step, to be published in `dtype`. Collective."""

    def adapter(self) -> Any:
        """Return the adapter of a LoRA policy (`weights.codec.Adapter`), which every rank has; None for others."""

    def prober(self, settings: Any) -> Callable[[], Probe | None]:
        """Return the function that makes the probe of the current weights, for the policy's settings. Collective."""

    def optimizers(self) -> Sequence[Any]:
        """Return what holds state that only an update needs (`offload.HasState`)."""

    def masters(self) -> Tensors:
        """Return the exact weights of everything that trains, each tied one once."""

    def moments(self) -> Tensors:
        """Return the state of the optimizers."""

    def restore(self, masters: Tensors, moments: Tensors, steps: int) -> None:
        """Continue exactly from these; CheckpointError if they belong to another model or optimizer."""


class Generator(Protocol):
    """The rollout of a process that also trains: it samples only between `begin` and `end`."""

    def begin(self, tensors: Tensors, version: int, probe: Probe | None = None) -> None:
        """Use these weights, which do not change until `end`, and sample with them once they have reproduced their
        probe."""

    def end(self) -> None:
        """Returns once no token is being sampled. Episodes that are under way wait for the next `begin`."""


class Executor(Protocol):
    """Starts and stops rollout nodes for a maintainer. Nodes outlive their executor: a new executor of the same kind
    finds them. Every call returns within its own deadline or raises RunError."""

    async def start(self, node: str) -> None:
        """Begin to start a node of this name. It then joins the run, or `nodes` reports that it has failed."""

    async def stop(self, node: str) -> None:
        """Stop a node that was drained or does not answer. Does nothing if it has ended."""

    async def nodes(self) -> dict[str, bool]:
        """Return the nodes that were started and not stopped, and whether each still runs."""

    async def close(self) -> None:
        """Release the executor's resources. The nodes run on."""
