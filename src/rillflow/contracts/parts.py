"""What the processes of a run are made of: clocks, engines, storage units, weight stores, and who starts nodes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from rillflow.types import Chunk, EngineStats, GenerateRequest, Probe, Row, UnitInfo

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    import torch

    Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
    Tensors = Mapping[str, torch.Tensor]


UNKNOWN = -1  # the version of weights that nobody vouches for


class Change(NamedTuple):
    """New values of some weights of one tensor: `value_K` at the places `index_K` (int64, ascending, each once) of the
    flat tensor; with `index_K` None, of all of them, in order. The values have the tensor's dtype."""

    index_K: torch.Tensor | None
    value_K: torch.Tensor


class Patch(NamedTuple):
    """What turns the weights of version `base` into another version's: tensors that are not named stay as they are.
    `fingerprints` are what the named ones have afterwards (`weights.fingerprint`)."""

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
    """Time is injected, so that deadlines can be tested without waiting."""

    def now(self) -> float:
        """Seconds since the epoch, for what is written down."""

    def monotonic(self) -> float:
        """Seconds that never go back, for deadlines."""


class SystemClock:
    """The real clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class TokenSource(Protocol):
    """What a gateway asks for tokens: an engine, or a pool of them. Closing the iterator aborts the request."""

    @property
    def context(self) -> int: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]: ...


class Engine(Protocol):
    """Token ids in; chunks of ids, log-probs and version out.

    A token is sampled by exactly one version. `load` takes effect between two tokens and drops no request:
    running requests go on, their later chunks carrying the new version. `pause` returns once no token is being
    sampled; requests stay and go on after `resume`. Closing the iterator of `generate` aborts the request.

    Weights that come with a probe serve once the engine has reproduced it. One that does not raises ProbeMismatch: its
    version is UNKNOWN then, and its requests wait until weights have come that prove right.
    """

    @property
    def version(self) -> int: ...

    @property
    def proven(self) -> bool:
        """Whether it samples from the weights that it has; False only after `doubt`, and after a mismatch."""

    @property
    def context(self) -> int:
        """Most tokens, prompt and answer together, that one sequence may have."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Raises ContextOverflow when the prompt leaves no room for one token, QueueFull at the bound."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    def doubt(self) -> None:
        """From now on, also after a restart, sample only from weights that were loaded or proven."""

    async def prove(self, probe: Probe | None) -> None:
        """Have the weights that are there reproduce their version's probe; None: the version has none."""

    async def load(self, tensors: Tensors, version: int, probe: Probe | None = None) -> None:
        """Raises WeightsError, changing nothing, when names, shapes or dtypes do not fit."""

    async def patch(self, patch: Patch, version: int, probe: Probe | None = None) -> None:
        """As `load`, of weights that differ from those it serves in a few places only. WeightsError, changing nothing,
        when it does not serve `patch.base`, or when the weights do not fit."""

    def stats(self) -> EngineStats: ...


@runtime_checkable
class DecodesDeltas(Protocol):
    """An engine that decodes published deltas by itself, on the device that holds its weights."""

    @property
    def decoding_refused(self) -> str:
        """The reason why it does not, or an empty string."""

    async def apply_deltas(self, deltas: Deltas, version: int, probe: Probe | None = None) -> None:
        """As `Engine.patch`. WeightsError, changing nothing, when it does not serve `deltas.base`, or when it cannot
        decode them."""


class StorageUnit(Protocol):
    """Holds payload columns. A row survives any kill once `put` has returned; a damaged one raises CorruptData.

    Rows lie in numbered segments, so that what is consumed can be dropped many rows at once.
    """

    def put(self, rows: Sequence[Mapping[str, Buffer]]) -> list[Row]: ...

    def get(self, rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, bytes]]:
        """The columns asked for, as far as a row has them."""

    def drop(self, segments: Sequence[int]) -> None:
        """Forget these segments; those that are gone already are passed over. Their numbers are never used again."""

    def closed(self, segments: Sequence[int]) -> list[int]:
        """Those of the segments that nobody will ever write into again, or that are gone."""

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
        """What an engine must reproduce of the version before it serves it; None: nothing."""

    def rewind(self, version: int) -> list[int]:
        """Make `version` the head again and mark later versions orphaned; returns them."""


class Generator(Protocol):
    """The rollout of a process that also trains: it samples only between `begin` and `end`."""

    def begin(self, tensors: Tensors, version: int, probe: Probe | None = None) -> None:
        """Take over these weights, which stay as they are until `end`, and sample with them once they have reproduced
        their probe."""

    def end(self) -> None:
        """Returns once no token is being sampled. Episodes that are under way wait for the next `begin`."""


class Executor(Protocol):
    """Starts and ends rollout nodes somewhere, for a maintainer. Nodes outlive who started them: a new executor of the
    same kind finds those of the one before it. Every call returns within its own deadline or raises RunError."""

    async def start(self, node: str) -> None:
        """Begin to start a node of this name; it joins the run by itself, or `nodes` tells that it has failed."""

    async def stop(self, node: str) -> None:
        """End a node that was drained, or that does not answer. One that has gone already is passed over."""

    async def nodes(self) -> dict[str, bool]:
        """The nodes that were started and not stopped, and whether each still runs."""

    async def close(self) -> None:
        """Let go of them: they run on."""
