"""The rows of a batch, part by part, as the ledger serves them: of episodes that others play (`fetch`), or that these
same workers play for this very step (`generate`). A graph without `generate` never wakes its worker's own engine.

Both note what the rows say as they were sampled, and apply the overlong filter: rows whose answer was cut say nothing
about its end, so they are not trained, while `answer_R` remembers how many tokens they had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.registry import REGISTRY, Function
from rillflow.trainer.graph.step import Step
from rillflow.trainer.metrics import RowValues


def fetch(step: Step) -> Iterator[Databuffer]:
    return _noted(step, step.fetch())


def generate(step: Step) -> Iterator[Databuffer]:
    return _noted(step, step.generate())


def _noted(step: Step, parts: Iterable[Databuffer]) -> Iterator[Databuffer]:
    seen = RowValues()
    for part in parts:
        seen.add(part.rows)
        rows = part.rows.masked(~part.rows.truncated_R) if step.config.overlong_filter else part.rows
        yield part.adding({"answer_R": part.rows.trained_R, "mask_N": rows.mask_N})
    step.metrics |= seen.values(step.peers)


REGISTRY.add(Function("fetch", "actor", "fetch", fetch, gives=("answer_R",), default=True))
REGISTRY.add(Function("generate", "actor", "generate", generate, gives=("answer_R",), default=True))
