"""Wires a trainer: worker, weight store, checkpoints, the stream of batches, health and metrics.

The loop computes in the process's main thread; everything that speaks HTTP lives in a thread of its own.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Gauge

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.payloads import PayloadReader
from rillflow.config import Recipe
from rillflow.contracts import Generator
from rillflow.errors import WireError
from rillflow.storage import read_json, startup, write_json
from rillflow.storage.spans import Spans
from rillflow.trainer.aside import MakesRoom
from rillflow.trainer.batches import columns_of
from rillflow.trainer.checkpoint import Checkpoints
from rillflow.trainer.graph.builtin import Mode
from rillflow.trainer.graph.worker import build_worker
from rillflow.trainer.loop import StepReport, TrainerLoop
from rillflow.trainer.parallel.address import Place
from rillflow.trainer.parallel.peers import Peers
from rillflow.trainer.parallel.ranks import RankStream
from rillflow.trainer.parallel.rendezvous import connect, device_of
from rillflow.trainer.process import prepare_torch, stops_on_signal
from rillflow.trainer.profiling import StepProfiler
from rillflow.trainer.staged import staged_columns
from rillflow.trainer.stream import RemoteStream, Stream
from rillflow.weights import FolderStore
from rillflow.weights.delta.ahead import Ahead
from rillflow.weights.models import DTYPES
from rillflow.weights.signing import key_of
from rillflow.weights.transport.serve import WeightService
from rillflow.weights.transport.shelf import FolderShelf
from rillflow.weights.transport.upload import uploader
from rillflow.wire import Client, LoopThread, Service
from rillflow.wire.collecting import keep_what_is_there
from rillflow.wire.tokens import Keyring, scoped_token

log = logging.getLogger(__name__)

_CALL = 10.0
_LAST_UPLOAD = 60.0
_LOOK = 1.0
_SERVED = "weights_server.json"


@dataclass(frozen=True)
class Access:
    """What a trainer holds of a run's secrets: the trainer's `token`, the `keyring` that tells who may call it, and the
    `key` that signs weights."""

    token: str
    keyring: Keyring
    key: bytes

    @classmethod
    def of_run(cls, token: str) -> Access:
        """From the run's own token, the operator's."""
        return cls(scoped_token(token, "trainer"), Keyring.of_run(token), key_of(scoped_token(token, "node")))


def run_trainer(
    recipe: Recipe,
    policy: str,
    folder: Path,
    dataflow_url: str,
    access: Access,
    *,
    on_ready: Callable[[str], None] | None = None,
    generator: Generator | None = None,
    place: Place | None = None,
    spans: Spans | None = None,
    serve: str | None = None,
    patience: float = math.inf,
) -> bool:
    """Train `policy` until the run has no more batches, or False when SIGTERM came first, to this rank or to another.

    `on_ready` gets the URL of the metrics. A `generator` samples in this process while no
    step computes. Any error ends the trainer; started again, it goes on from its last checkpoint. Of several ranks each
    runs this at its own `place`; rank 0 speaks for all of them. If one has a `generator`, all have: their decisions
    must be the same. `spans` hear what this worker does. A trainer whose `folder` nobody else sees has an address to
    `serve` its weights at; it stays for those who fetch them until the run has ended, or has not answered for
    `patience` seconds.
    """
    stop = threading.Event()
    place = place or Place()
    device = device_of(recipe.policies[policy].trainer.device, place.rank)
    with (
        stops_on_signal(stop),
        connect(place, device) as peers,
        _Wire(dataflow_url, access, policy) as wire,
        _opened(recipe, policy, folder, access.key, peers) as (store, published),
    ):
        if peers.rank == 0:
            wire.listen(on_ready)
        if serve is not None:
            wire.serve_weights(folder / "weights", serve)
        startup.doing("loading the model")
        loop = build_loop(
            recipe,
            policy,
            folder,
            _stream(recipe, policy, wire, peers, stop=stop.is_set, own_samples=generator is not None),
            peers,
            # Several ranks stop together: their stream tells them when.
            stop=stop.is_set if peers.size == 1 else _never,
            report=Gauges(wire.service.registry, policy),
            generator=generator,
            store=store,
            in_use=wire.versions_in_use,
            wanted=wire.versions_wanted,
            published=published,
            spans=spans,
        )
        keep_what_is_there()
        finished = loop.run()
        if serve is not None and finished:
            wire.wait_for_end(stop, patience)
    return finished and not stop.is_set()


class _Wire:
    """What speaks HTTP, in a thread of its own."""

    def __init__(self, dataflow_url: str, access: Access, policy: str) -> None:
        self._policy = policy
        self._keyring = access.keyring
        self._weights: WeightService | None = None
        self.weights_url = ""  # where this process serves its weights, if it does
        self.thread = LoopThread("trainer-wire")
        self.service = Service(f"trainer-{policy}", access.keyring)
        self.dataflow = DataflowClient(Client(dataflow_url, access.token, peer="dataflow"))
        self.reader = PayloadReader(self.dataflow.units, access.token)

    def __enter__(self) -> Self:
        return self

    def listen(self, on_ready: Callable[[str], None] | None) -> None:
        url = self.thread.run(self.service.start(), _CALL)
        log.info("metrics at %s/metrics", url)
        if on_ready is not None:
            on_ready(url)

    def serve_weights(self, root: Path, host: str) -> None:
        """For nodes: they hear where from the dataflow service, which is told when the trainer joins. A trainer that
        comes back listens where it did before: nodes look for it there."""
        known = root.parent / _SERVED
        port = urlsplit(str(read_json(known)["url"])).port if known.is_file() else 0
        self._weights = WeightService(FolderShelf(root), self._keyring)
        self.weights_url = self.thread.run(self._weights.start(host, port or 0), _CALL)
        write_json(known, {"url": self.weights_url})
        log.info("weights are served at %s", self.weights_url)

    def wait_for_end(self, stop: threading.Event, patience: float) -> None:
        """Wait until the run has ended: those who evaluate the last version still fetch it."""
        heard = time.monotonic()
        log.info("trained; serving weights until the run has ended")
        while not stop.wait(_LOOK):
            try:
                if self.thread.run(self.dataflow.status(_CALL), _CALL + 1.0).phase == "ended":
                    return
                heard = time.monotonic()
            except (WireError, TimeoutError) as error:
                if time.monotonic() - heard > patience:
                    log.warning("the run's service has not answered for %.0f s: %s", patience, error)
                    return

    def versions_in_use(self) -> list[int]:
        """Those that live nodes serve."""
        return self.thread.run(self.dataflow.versions_in_use(self._policy), _CALL)

    def versions_wanted(self) -> list[int]:
        """Those that evaluations want kept."""
        return self.thread.run(self.dataflow.versions_wanted(self._policy), _CALL)

    def __exit__(self, *_: object) -> None:
        if self._weights is not None:
            self.thread.run(self._weights.stop(), _CALL)
        self.thread.run(self.service.stop(), _CALL)
        self.thread.run(self.reader.close(), _CALL)
        self.thread.run(self.dataflow.close(), _CALL)
        self.thread.close()


def _stream(
    recipe: Recipe, policy: str, wire: _Wire, peers: Peers, *, stop: Callable[[], bool], own_samples: bool
) -> Stream:
    settings = recipe.policies[policy].trainer
    staged = tuple(staged_columns(recipe.policies[policy].stages))
    remote = RemoteStream(
        wire.thread,
        wire.dataflow,
        wire.reader,
        policy=policy,
        incarnation=peers.first(uuid.uuid4().hex.encode()).decode(),
        groups=settings.batch_groups,
        # Which groups come together depends on timing, and with them the rounding of their sum. Who samples by
        # itself would stop for every part.
        least=0 if recipe.runtime.deterministic or own_samples else settings.stream_groups,
        columns=columns_of(settings),
        staged=staged,
        weights_url=wire.weights_url,
        rank=peers.rank,
        ranks=peers.size,
    )
    if peers.size == 1:
        return remote
    return RankStream(remote, peers, stop=stop, sharded=settings.sharding != "none", staged=staged)


def _never() -> bool:
    return False


def build_loop(
    recipe: Recipe,
    policy: str,
    folder: Path,
    stream: Stream,
    peers: Peers,
    *,
    stop: Callable[[], bool],
    report: Callable[[StepReport], None],
    store: FolderStore,
    in_use: Callable[[], Collection[int]],
    wanted: Callable[[], Collection[int]],
    published: Callable[[], None],
    generator: Generator | None = None,
    spans: Spans | None = None,
) -> TrainerLoop:
    """The loop of a policy on its part of the run folder."""
    settings = recipe.policies[policy]
    prepare_torch(recipe.seed, recipe.runtime.threads, deterministic=recipe.runtime.deterministic)
    device = device_of(settings.trainer.device, peers.rank)
    worker = build_worker(recipe, policy, peers, device=device, mode=_mode(recipe, generator))
    if generator is not None and recipe.resources.memory == "release":
        generator = MakesRoom(generator, worker.optimizers(), folder)
    return TrainerLoop(
        stream,
        worker,
        store,
        Checkpoints(folder / "checkpoints" / policy, settings.trainer.keep_checkpoints, peers),
        settings.trainer,
        peers=peers,
        # Engines refuse weights of another dtype than theirs.
        publish_dtype=DTYPES[settings.engine.dtype],
        publish_first=_publishes_first(recipe, policy, generator),
        recipe_hash=hashlib.sha256(recipe.model_dump_json().encode()).hexdigest(),
        stop=stop,
        report=report,
        generator=generator,
        weights=settings.weights,
        in_use=in_use,
        wanted=wanted,
        published=published,
        shard_deltas=settings.writes_deltas and _sharded(recipe, policy, peers),
        probe=worker.prober(settings),
        spans=spans,
        profiler=StepProfiler.of(settings.trainer.profile, folder / "profiles" / policy, peers.rank),
    )


def _mode(recipe: Recipe, generator: Generator | None) -> Mode:
    """What this trainer does, which may differ from the recipe: tags change at run time."""
    if generator is None:
        return "asynchronous"
    return "multiplexed" if recipe.mode == "asynchronous" else recipe.mode


def _sharded(recipe: Recipe, policy: str, peers: Peers) -> bool:
    return recipe.policies[policy].trainer.sharding != "none" and peers.size > 1


@contextmanager
def _opened(
    recipe: Recipe, policy: str, folder: Path, key: bytes, peers: Peers
) -> Iterator[tuple[FolderStore, Callable[[], None]]]:
    """The policy's store, and what to call when it has changed: rank 0 copies it to the object store that the recipe
    names, if any. The last versions get some time at the end."""
    settings, deltas = recipe.policies[policy].weights, recipe.policies[policy].writes_deltas
    store = FolderStore(
        folder / "weights" / policy,
        key,
        # The ranks of a sharded model find out themselves what has changed.
        deltas=deltas and not _sharded(recipe, policy, peers),
        fingerprints=deltas,
        snapshot_every=settings.snapshot_every,
        ready=_ready(recipe, policy, peers) if deltas else lambda: True,
    )
    copies = uploader(store, settings.source, policy) if peers.rank == 0 else None
    try:
        yield store, _nothing if copies is None else copies.poke
    finally:
        if copies is not None:
            copies.close(_LAST_UPLOAD)


def _ready(recipe: Recipe, policy: str, peers: Peers) -> Callable[[], bool]:
    """Whether deltas can be made at once: what makes them is compiled while the model is loaded and samples come."""
    settings = recipe.policies[policy]
    return Ahead(DTYPES[settings.engine.dtype], device_of(settings.trainer.device, peers.rank)).ready


def _nothing() -> None:
    """Nobody copies."""


def _publishes_first(recipe: Recipe, policy: str, generator: Generator | None) -> bool:
    """Where a delay would gain nothing, because nodes may not sample on before they have the new weights; and where any
    commit may be the last, because prompts run out or the target is reached. Where every trainer samples by itself
    nobody waits for the store."""
    alone = generator is not None and recipe.mode == "colocated"
    may_end = recipe.data.epochs is not None or recipe.evaluation.target is not None
    return (recipe.staleness(policy) == 0 and not alone) or may_end


class Gauges:
    """The last step's metrics, as Prometheus gauges."""

    def __init__(self, registry: CollectorRegistry, policy: str) -> None:
        self._registry = registry
        self._policy = policy
        self._gauges: dict[str, Gauge] = {}

    def __call__(self, report: StepReport) -> None:
        values = report.metrics | {"step": float(report.step), "version": float(report.version)}
        for name, value in values.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(
                    f"rillflow_trainer_{name}", f"{name} of the last step", ["policy"], registry=self._registry
                )
            self._gauges[name].labels(self._policy).set(value)
