"""Wires a worker of a stage."""

from __future__ import annotations

import asyncio
import logging

from rillflow.config import Recipe
from rillflow.stages.stage import build_stage
from rillflow.stages.worker import StageWorker
from rillflow.storage import startup
from rillflow.storage.spans import Spans

log = logging.getLogger(__name__)


async def run_stage(
    recipe: Recipe,
    policy: str,
    name: str,
    *,
    dataflow_url: str,
    token: str,
    patience: float | None = None,
    spans: Spans | None = None,
) -> None:
    """Work for the stage `name` of `policy` until the run has ended. `token` is the stage's, `spans` its timeline."""
    startup.doing("loading the model")
    stage = await asyncio.to_thread(build_stage, recipe, policy, name)
    worker = StageWorker(
        recipe, policy, name, stage, dataflow_url=dataflow_url, token=token, patience=patience, spans=spans
    )
    startup.ready()
    log.info("works for stage %s of %s", name, policy)
    try:
        await worker.run()
    finally:
        await worker.close()
