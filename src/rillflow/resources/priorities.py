"""Who is measured, and when: only where it matters which of several workers train."""

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
    """Workers with their rooflines, where more of them can train a policy than it wants and some are not known.

    Those on this machine share what it has: it is measured once. Where it cannot be, the order of the recipe decides.
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
    """Workers of this machine with what it is measured at now; what the recipe declares of one stays."""
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
    """Workers as they are, with the numbers of their namesakes in `known`."""
    numbers = {worker.name: (worker.tflops, worker.bandwidth) for worker in known}
    return [
        msgspec.structs.replace(worker, tflops=tflops, bandwidth=bandwidth)
        for worker in workers
        for tflops, bandwidth in [numbers.get(worker.name, (worker.tflops, worker.bandwidth))]
    ]
