"""Wires a trainer: model, learner, weight store, checkpoints, the stream of batches, health and metrics.

The loop computes in the process's main thread; everything that speaks HTTP lives in a thread of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from prometheus_client import CollectorRegistry, Gauge

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.payloads import PayloadReader
from rillflow.config import PolicyConfig, Recipe
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.checkpoint import Checkpoints
from rillflow.trainer.loop import StepReport, TrainerLoop
from rillflow.trainer.step import Learner
from rillflow.trainer.stream import RemoteStream, Stream
from rillflow.weights import FolderStore
from rillflow.weights.models import DTYPES, load_policy_model, pick_device
from rillflow.wire import Client, LoopThread, Service

log = logging.getLogger(__name__)

_CALL = 10.0


def run_trainer(
    recipe: Recipe,
    policy: str,
    folder: Path,
    dataflow_url: str,
    token: str,
    *,
    on_ready: Callable[[str], None] | None = None,
) -> bool:
    """Train `policy` until the run has no more batches, or False when SIGTERM came first.

    `on_ready` gets the URL of the metrics. Any error ends the trainer; started again, it goes on from its last
    checkpoint.
    """
    stop = threading.Event()
    thread = LoopThread("trainer-wire")
    service = Service(f"trainer-{policy}", token)
    dataflow = DataflowClient(Client(dataflow_url, token, peer="dataflow"))
    reader = PayloadReader(dataflow.units, token)
    settings = recipe.policies[policy].trainer
    try:
        url = thread.run(service.start(), _CALL)
        log.info("metrics at %s/metrics", url)
        if on_ready is not None:
            on_ready(url)
        stream = RemoteStream(
            thread,
            dataflow,
            reader,
            policy=policy,
            incarnation=uuid.uuid4().hex,
            groups=settings.batch_groups,
            # Which groups come together depends on timing, and with them the rounding of their sum.
            least=0 if recipe.runtime.deterministic else settings.stream_groups,
        )
        with _stops_on_signal(stop):
            report = Gauges(service.registry, policy)
            build_loop(recipe, policy, folder, stream, stop=stop.is_set, report=report).run()
        return not stop.is_set()
    finally:
        thread.run(service.stop(), _CALL)
        thread.run(reader.close(), _CALL)
        thread.run(dataflow.close(), _CALL)
        thread.close()


def build_loop(
    recipe: Recipe,
    policy: str,
    folder: Path,
    stream: Stream,
    *,
    stop: Callable[[], bool],
    report: Callable[[StepReport], None],
) -> TrainerLoop:
    """The loop of a policy on its part of the run folder."""
    settings = recipe.policies[policy]
    _seed(recipe)
    return TrainerLoop(
        stream,
        _learner(settings, in_order=recipe.runtime.deterministic),
        FolderStore(folder / "weights" / policy),
        Checkpoints(folder / "checkpoints" / policy, settings.trainer.keep_checkpoints),
        settings.trainer,
        # Engines refuse weights of another dtype than theirs.
        publish_dtype=DTYPES[settings.engine.dtype],
        recipe_hash=hashlib.sha256(recipe.model_dump_json().encode()).hexdigest(),
        stop=stop,
        report=report,
    )


def _learner(settings: PolicyConfig, *, in_order: bool) -> Learner:
    config = settings.trainer
    model = load_policy_model(settings.model, "fp32", pick_device(config.device))
    return Learner(model, ALGORITHMS[config.algorithm](config), config, in_order=in_order)


def _seed(recipe: Recipe) -> None:
    torch.manual_seed(recipe.seed)
    if recipe.runtime.threads:
        torch.set_num_threads(recipe.runtime.threads)
    if recipe.runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextmanager
def _stops_on_signal(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT ask for an orderly end: the step in progress is given up, a checkpoint is written."""

    def ask(number: int, frame: FrameType | None) -> None:
        log.info("signal %d: stopping", number)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread's owner
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
