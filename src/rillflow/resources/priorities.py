"""Measures workers, only if it matters which of several workers train."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from rillflow.config import Recipe
from rillflow.errors import RunError
from rillflow.resources.roofline import Roofline, measure_apart
from rillflow.resources.workers import Worker, initial_workers

log = logging.getLogger(__name__)

Measure = Callable[[int], Roofline]


def measured(recipe: Recipe, workers: Sequence[Worker], measure: Measure = measure_apart) -> list[Worker]:
    """Return workers with their rooflines, if more of them can train a policy than it needs and some are unknown.

    Workers on this machine share one measurement. If it fails, the order of the recipe decides.
    """
    unknown = [worker for worker in workers if "train" in worker.tags and worker.priority is None]
    if not unknown or not _choice(recipe, workers):
        return list(workers)
    try:
        return remeasured(recipe, workers, measure)
    except RunError as error:
        log.warning("%s", error)
        return list(workers)


def remeasured(recipe: Recipe, workers: Sequence[Worker], measure: Measure = measure_apart) -> list[Worker]:
    """Return workers of this machine with a new measurement; declared numbers stay."""
    found = measure(recipe.runtime.threads)
    declared = {worker.name: worker for worker in initial_workers(recipe)}

    def told(worker: Worker) -> Worker:
        said = declared.get(worker.name, worker)
        return msgspec.structs.replace(
            worker, tflops=said.tflops or found.tflops, bandwidth=said.bandwidth or found.bandwidth
        )

    return [worker if worker.where else told(worker) for worker in workers]


def _choice(recipe: Recipe, workers: Sequence[Worker]) -> bool:
    able = Counter(worker.policy for worker in workers if "train" in worker.tags)
    return any(able[name] > policy.trainer.ranks for name, policy in recipe.policies.items())


def with_rooflines(workers: Sequence[Worker], known: Sequence[Worker]) -> list[Worker]:
    """Return the workers with the rooflines of those of the same name in `known`."""
    numbers = {worker.name: (worker.tflops, worker.bandwidth) for worker in known}
    return [
        msgspec.structs.replace(worker, tflops=tflops, bandwidth=bandwidth)
        for worker in workers
        for tflops, bandwidth in [numbers.get(worker.name, (worker.tflops, worker.bandwidth))]
    ]
