"""Builds and runs a trainer: worker, weight store, checkpoints, the stream of batches, health and metrics.

The loop computes in the process's main thread; everything that uses HTTP runs in a separate thread.
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

from rillflow.clients import ledgers
from rillflow.clients.payloads import PayloadReader
from rillflow.config import Recipe
from rillflow.contracts import Generator
from rillflow.errors import WireError
from rillflow.storage import read_json, startup, write_json
from rillflow.storage.spans import Spans
from rillflow.trainer.backends import BACKENDS
from rillflow.trainer.batches import columns_of, staged_columns
from rillflow.trainer.checkpoint import Checkpoints
from rillflow.trainer.graph.builtin import Mode
from rillflow.trainer.loop import StepReport, TrainerLoop
from rillflow.trainer.offload import OffloadingGenerator
from rillflow.trainer.parallel import Peers
from rillflow.trainer.parallel.context import in_teams
from rillflow.trainer.parallel.distributed import connect, device_of
from rillflow.trainer.parallel.launch import Place
from rillflow.trainer.process import StepProfiler, prepare_torch, stops_on_signal
from rillflow.trainer.remote_stream import RemoteStream
from rillflow.trainer.stream import RankStream, Stream
from rillflow.weights import FolderStore
from rillflow.weights.delta import Ahead
from rillflow.weights.manifest import key_of
from rillflow.weights.models import DTYPES
from rillflow.weights.transport.object_store import uploader
from rillflow.weights.transport.serve import FolderShelf, WeightService
from rillflow.wire import LoopThread, Service
from rillflow.wire.blocking import keep_what_is_there
from rillflow.wire.tokens import Keyring, scoped_token

log = logging.getLogger(__name__)

_CALL = 10.0
_LAST_UPLOAD = 60.0
_LOOK = 1.0
_SERVED = "weights_server.json"


@dataclass(frozen=True)
class Access:
    """A trainer's secrets: its own `token`, the `keyring` of those who may call it, and the `key` that signs
    weights."""

    token: str
    keyring: Keyring
    key: bytes

    @classmethod
    def of_run(cls, token: str) -> Access:
        """Derive the secrets from the run's own token, the operator's."""
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
    """Train `policy` until the run has no more batches; return False if SIGTERM came first, on any rank.

    `on_ready` gets the URL of the metrics. A `generator` samples in this process while no step computes. Any error ends
    the trainer; a restarted trainer continues from its last checkpoint. Each of several ranks runs this at its own
    `place`; rank 0 talks to the services. Either all ranks have a `generator` or none: their decisions must be the
    same. `spans` record what this worker does. A trainer whose `folder` is not shared serves its weights at the address
    `serve`; it stays until the run has ended, or has not answered for `patience` seconds.
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
            # Several ranks stop together, through their stream.
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
    """The HTTP clients and services of a trainer, in a separate thread."""

    def __init__(self, dataflow_url: str, access: Access, policy: str) -> None:
        self._policy = policy
        self._keyring = access.keyring
        self._weights: WeightService | None = None
        self.weights_url = ""  # set if this process serves its weights
        self.thread = LoopThread("trainer-wire")
        self.service = Service(f"trainer-{policy}", access.keyring)
        self.dataflow = ledgers.connect(dataflow_url, access.token)
        self.reader = PayloadReader(self.dataflow.units, access.token)

    def __enter__(self) -> Self:
        return self

    def listen(self, on_ready: Callable[[str], None] | None) -> None:
        url = self.thread.run(self.service.start(), _CALL)
        log.info("metrics at %s/metrics", url)
        if on_ready is not None:
            on_ready(url)

    def serve_weights(self, root: Path, host: str) -> None:
        """Serve weights to nodes, which learn the address from the dataflow service after the trainer has joined.

        A restarted trainer listens at the same port, where nodes look for it.
        """
        known = root.parent / _SERVED
        port = urlsplit(str(read_json(known)["url"])).port if known.is_file() else 0
        self._weights = WeightService(FolderShelf(root), self._keyring)
        self.weights_url = self.thread.run(self._weights.start(host, port or 0), _CALL)
        write_json(known, {"url": self.weights_url})
        log.info("serving weights at %s", self.weights_url)

    def wait_for_end(self, stop: threading.Event, patience: float) -> None:
        """Wait until the run has ended: evaluations of the last version still fetch it."""
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
        """Return the versions that live nodes serve."""
        return self.thread.run(self.dataflow.versions_in_use(self._policy), _CALL)

    def versions_wanted(self) -> list[int]:
        """Return the versions that evaluations want kept."""
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
    teams = in_teams(peers, settings)
    staged = tuple(staged_columns(recipe.policies[policy].stages))
    remote = RemoteStream(
        wire.thread,
        wire.dataflow,
        wire.reader,
        policy=policy,
        incarnation=peers.first(uuid.uuid4().hex.encode()).decode(),
        groups=settings.batch_groups,
        # Whole batches in deterministic mode: the groups of a part depend on timing, and the rounding of their sum on
        # the groups. A trainer that samples itself would stop sampling for every part.
        least=0 if recipe.runtime.deterministic or own_samples else settings.stream_groups,
        columns=columns_of(settings),
        staged=staged,
        weights_url=wire.weights_url,
        rank=teams.rank,
        ranks=teams.size,
        renews=peers.rank == 0,
    )
    if peers.size == 1:
        return remote
    return RankStream(
        remote,
        peers,
        stop=stop,
        lockstep=settings.lockstep,
        staged=staged,
        experts=settings.replay_routing,
    )


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
    """Build the loop of a policy on its part of the run folder."""
    settings = recipe.policies[policy]
    prepare_torch(recipe.seed, recipe.runtime.threads, deterministic=recipe.runtime.deterministic)
    device = device_of(settings.trainer.device, peers.rank)
    build = BACKENDS[settings.trainer.backend]
    worker = build(recipe, policy, peers, device=device, mode=_mode(recipe, generator))
    if generator is not None and recipe.resources.memory == "release":
        generator = OffloadingGenerator(generator, worker.optimizers(), folder)
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
        by_shards=_sharded(recipe, policy, peers) and settings.trainer.lora is None,
        probe=worker.prober(settings),
        spans=spans,
        profiler=StepProfiler.of(settings.trainer.profile, folder / "profiles" / policy, peers.rank),
    )


def _mode(recipe: Recipe, generator: Generator | None) -> Mode:
    """Return this trainer's mode, which may differ from the recipe's because tags change at run time."""
    if generator is None:
        return "asynchronous"
    return "multiplexed" if recipe.mode == "asynchronous" else recipe.mode


def _sharded(recipe: Recipe, policy: str, peers: Peers) -> bool:
    return recipe.policies[policy].trainer.sharding != "none" and peers.size > 1


@contextmanager
def _opened(
    recipe: Recipe, policy: str, folder: Path, key: bytes, peers: Peers
) -> Iterator[tuple[FolderStore, Callable[[], None]]]:
    """Open the policy's store; yield it with a function to call after changes.

    Rank 0 copies the store to the recipe's object store, if any, and waits for the last versions at the end.
    """
    settings, deltas = recipe.policies[policy].weights, recipe.policies[policy].writes_deltas
    store = FolderStore(
        folder / "weights" / policy,
        key,
        # The ranks of a sharded model find their changes themselves.
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
    """Return a function that says whether the delta encoder is compiled. That happens while the model is loaded."""
    settings = recipe.policies[policy]
    return Ahead(DTYPES[settings.engine.dtype], device_of(settings.trainer.device, peers.rank)).ready


def _nothing() -> None:
    """Do nothing."""


def _publishes_first(recipe: Recipe, policy: str, generator: Generator | None) -> bool:
    """Return whether versions are published before they are committed.

    They are if a delay would gain nothing, because nodes must have the new weights before they sample; and if any
    commit may be the last, because prompts run out or the target is reached. In colocated mode trainers do not wait for
    the store.
    """
    alone = generator is not None and recipe.mode == "colocated"
    may_end = recipe.data.epochs is not None or recipe.evaluation.target is not None
    return (recipe.staleness(policy) == 0 and not alone) or may_end


class Gauges:
    """Shows the last step's metrics as Prometheus gauges."""

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
