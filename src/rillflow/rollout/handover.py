"""A node in the process of its trainer: it samples when the trainer lets it, with weights handed over in memory.

Invariants: the own engine samples no token, and no task is leased, before the first `begin`, nor between an `end` and
the next `begin`; its tokens in between have the version that was handed over. Episodes that are cut by an `end` stay
open. If they pause, they go on, with a seam, under the weights of the next `begin`, and their time stands still
meanwhile; if they move, they go on at once at engines of other workers, at the version that those serve.

Beside nodes that only roll out this is the spatiotemporal multiplexing of SeamlessFlow (4.3), step by step:

1. Workers carry tags: the trainer's process both, `rollout` and `train`, others `rollout` alone (`config.runs`).
2. All of them roll out at first: the trainer waits for a batch, between `begin` and `end`.
3. The trainer's lease of a batch is answered as soon as there are enough samples for an update.
4. Its worker is preempted: `end`. Others are not interrupted; their samples are off-policy by one version from now on.
5. The update is done: `begin` again. All roll out on the new weights, this worker from memory, others from the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import WeightsError
from rillflow.gateway.node_engines import NodeEngines
from rillflow.rollout.episodes import Episodes
from rillflow.types import Probe

if TYPE_CHECKING:
    import torch

    from rillflow.contracts import Tensors
    from rillflow.storage.spans import Spans

_TRAINING = "training"


class HandedWeights:
    """A `contracts.WeightStore` of one version, held in memory until the engine has it."""

    def __init__(self) -> None:
        self._head: int | None = None
        self._tensors: Tensors = {}
        self._probe: Probe | None = None

    def publish(self, tensors: Tensors, version: int, parent: int | None, probe: Probe | None = None) -> None:
        self._head, self._tensors, self._probe = version, tensors, probe

    def head(self) -> int | None:
        return self._head

    def versions(self) -> list[int]:
        return [] if self._head is None else [self._head]

    def pull(self, version: int) -> dict[str, torch.Tensor]:
        if version != self._head or not self._tensors:
            raise WeightsError(f"version {version} is not here", "the trainer hands over its newest weights alone")
        return dict(self._tensors)

    def probe(self, version: int) -> Probe | None:
        return self._probe if version == self._head else None

    def rewind(self, version: int) -> list[int]:
        """Return no version: none is kept."""
        return []

    def taken(self) -> None:
        """Forget the tensors, of which the engine has a copy now: the trainer may change them."""
        self._tensors = {}


class NodeClock:
    """A clock whose monotonic time stands still between `stop` and `go`: an episode that training has paused does not
    grow older. `now` is the real time."""

    def __init__(self, real: Clock | None = None) -> None:
        self._real = real or SystemClock()
        self._behind = 0.0
        self._stopped: float | None = None

    def now(self) -> float:
        return self._real.now()

    def monotonic(self) -> float:
        return (self._real.monotonic() if self._stopped is None else self._stopped) - self._behind

    def stop(self) -> None:
        if self._stopped is None:
            self._stopped = self._real.monotonic()

    def go(self) -> None:
        if self._stopped is not None:
            self._behind += self._real.monotonic() - self._stopped
            self._stopped = None


class Handover:
    """The trainer's control of the node in its process; everything here runs in the node's event loop.

    With `move`, running answers go on at other engines, if any, while the trainer needs this worker; with `free`, the
    engine releases the memory of its cache meanwhile. `spans` record the work of the node's engine.
    """

    def __init__(
        self,
        policy: str,
        *,
        move: bool = False,
        free: bool = False,
        spans: Spans | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.weights = HandedWeights()
        self.clock = NodeClock(clock)
        self.spans = spans
        self._policy = policy
        self._move = move
        self._free = free
        self._engines: NodeEngines | None = None
        self._episodes: Episodes | None = None

    async def attach(self, engines: NodeEngines, episodes: Episodes) -> None:
        """Take over a node that is about to run; it rests until `begin`."""
        self._engines, self._episodes = engines, episodes
        await self.end()

    def detach(self) -> None:
        """Release a node that has ended."""
        self._engines = self._episodes = None

    async def begin(self, tensors: Tensors, version: int, probe: Probe | None = None) -> None:
        """Sample with these weights (steps 2 and 5). WeightsError when they do not fit the engine, or when it does not
        reproduce their probe."""
        engines, episodes = self._engines, self._episodes
        if engines is None or episodes is None:
            return
        self.weights.publish(tensors, version, None, probe)
        await engines.refresh(self._policy)
        self.weights.taken()
        if self._engines is None:
            return  # it has ended meanwhile
        serving = engines.own_version(self._policy)
        if serving != version:
            raise WeightsError(
                f"the engine serves version {serving}, not version {version} which was handed over",
                engines.trouble or "the log says why they were refused; dtype, model and shapes must be the trainer's",
            )
        self.clock.go()
        await engines.release(_TRAINING)
        episodes.resting = False
        episodes.on_room()

    async def end(self) -> None:
        """The worker is preempted (step 4). Returns once no token is being sampled here."""
        if self._engines is None or self._episodes is None:
            return
        self._episodes.resting = True
        moved = await self._engines.hold(_TRAINING, move=self._move, free=self._free)
        if not moved:
            self.clock.stop()
