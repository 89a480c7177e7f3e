"""A worker that rolls out and trains: a node in a thread of a trainer's process, and the switch between the two.

The node has an event loop of its own. It plays while the trainer waits for a batch and is preempted while a step
computes, so the two never want the worker's cores at once; heartbeats go on meanwhile, and so do episodes that have
moved to engines of other workers. Tasks, trajectories and batches pass through the dataflow layer as they do in every
run. Alone, this is the colocated mode; beside nodes that only roll out, the multiplexed one (`rollout.handover` has its
steps).

A node that dies ends its trainer too: the process ends, and its supervisor starts both again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from rillflow.contracts import Generator
from rillflow.errors import RunError
from rillflow.rollout.handover import Handover
from rillflow.rollout.main import run_node
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.process import LoopWatchdog, bind_host
from rillflow.trainer.process import stops_on_signal
from rillflow.wire import LoopThread

if TYPE_CHECKING:
    from rillflow.contracts import Tensors
    from rillflow.storage.spans import Spans
    from rillflow.types import Probe

log = logging.getLogger(__name__)

_START = 120.0  # seconds for the node to load its model and listen
_SWITCH = 120.0  # for weights to be copied, or for the token that is being sampled
_CLOSE = 10.0
_LOOK = 0.2

Play = Callable[[Handover, Callable[[], None]], Coroutine[Any, Any, None]]


class Rests:
    """The `contracts.Generator` of a rank that plays no episodes while others of its trainer do. All ranks take the
    same steps, because these may contain collectives."""

    def begin(self, tensors: Tensors, version: int, probe: Probe | None = None) -> None: ...

    def end(self) -> None: ...


def run_hosted(
    folder: RunFolder, name: str, dataflow_url: str, train: Callable[[Generator], bool], spans: Spans | None = None
) -> bool:
    """Run `train` with the node `name` as its generator, then play until the run has ended, for the last evaluation.

    Returns False if a signal came first. `spans` record what the node's engine does.
    """
    resources = folder.recipe.resources
    stop = threading.Event()
    # A failed node stops the trainer as a signal does: its step is abandoned and a checkpoint written.
    node = NodeThread(
        Handover(
            folder.recipe.policy,
            move=resources.on_preempt == "move",
            free=resources.memory == "release",
            spans=spans,
        ),
        _playing(folder, name, dataflow_url),
        on_failure=lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    with stops_on_signal(stop):  # before and after the trainer, which has handlers of its own
        try:
            node.start()
            finished = not stop.is_set() and train(node)
            node.check()
            if finished:
                log.info("trained; playing on until the run has ended")
            while finished and not stop.is_set() and not node.has_ended(_LOOK):
                pass
            return finished and not stop.is_set()
        finally:
            node.close()


def _playing(folder: RunFolder, name: str, dataflow_url: str) -> Play:
    """Return the function that runs a node, for a thread."""
    recipe = folder.recipe

    async def play(handover: Handover, on_ready: Callable[[], None]) -> None:
        def listening(url: str) -> None:
            folder.publish_endpoint(name, url)
            on_ready()

        watchdog = asyncio.create_task(LoopWatchdog(recipe.rollout.episode_timeout).run())
        try:
            await run_node(
                name,
                recipe,
                dataflow_url=dataflow_url,
                token=folder.token_of("node"),
                keyring=folder.keyring,
                weights=folder.root / "weights",
                folder=folder.gateway(name),
                on_ready=listening,
                host=bind_host(recipe),
                port=folder.last_port(name),
                handover=handover,
            )
        finally:
            watchdog.cancel()

    return play


class NodeThread:
    """The `contracts.Generator` over a node that `play` runs; `on_failure` is called in the node's thread if it raised.

    `play` reports when the node is ready; the node then waits for the first `begin`.
    """

    def __init__(self, handover: Handover, play: Play, on_failure: Callable[[], None]) -> None:
        self._handover = handover
        self._play = play
        self._on_failure = on_failure
        self._thread = LoopThread("node")
        self._node: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._ready = threading.Event()
        self._ended = threading.Event()

    def start(self) -> None:
        self._thread.run(self._start(), _SWITCH)
        if not self._ready.wait(_START):
            raise RunError(f"the node did not start within {_START:.0f} s", "see the lines above this one in the log")
        self.check()

    async def _start(self) -> None:
        self._node = asyncio.create_task(self._run(), name="node")

    async def _run(self) -> None:
        try:
            await self._play(self._handover, self._ready.set)
        except Exception as error:
            log.exception("the node failed")
            self._error = error
            self._on_failure()
        finally:
            self._ended.set()
            self._ready.set()

    def begin(self, tensors: Tensors, version: int, probe: Probe | None = None) -> None:
        self.check()
        self._thread.run(self._handover.begin(tensors, version, probe), _SWITCH)

    def end(self) -> None:
        self._thread.run(self._handover.end(), _SWITCH)

    def check(self) -> None:
        """Raise the node's exception, if it failed."""
        if self._error is not None:
            raise self._error

    def has_ended(self, seconds: float) -> bool:
        """Return whether the node has finished within `seconds`."""
        ended = self._ended.wait(seconds)
        self.check()
        return ended

    def close(self) -> None:
        """Stop the node. Its sessions stay for the next one, if the run goes on."""
        try:
            self._thread.run(self._cancel(), _CLOSE)
            self._thread.close()
        except TimeoutError:
            log.warning("the node did not end within %.0f s: it is left to end with the process", _CLOSE)

    async def _cancel(self) -> None:
        if self._node is not None:
            self._node.cancel()
            await asyncio.wait({self._node})
