"""The dataflow process: builds ledger and service in a run's folder and serves until cancelled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rillflow.config import Recipe
from rillflow.contracts import Clock, GroupReward
from rillflow.dataflow.hooks import Hooks
from rillflow.dataflow.journal import Journal
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.rules import Rules
from rillflow.dataflow.service import DataflowService
from rillflow.dataflow.sources import open_heldout, open_sources
from rillflow.storage import disk_errors
from rillflow.storage.trajectories import FILE, KINDS, Bounds
from rillflow.weights.updates import Invitation
from rillflow.wire.collecting import keep_what_is_there
from rillflow.wire.tokens import Keyring

LEDGER, METRICS = "ledger.sqlite", "metrics.jsonl"


def open_ledger(
    recipe: Recipe, folder: Path, *, resume: bool = False, clock: Clock | None = None, group_reward: bool = False
) -> Ledger:
    """The ledger of the run in `folder`, new or as it was left."""
    data = recipe.data
    source = open_sources(data.prompts, seed=recipe.seed, shuffle=data.shuffle)
    heldout = open_heldout(data.heldout, seed=recipe.seed)
    hooks = Hooks.of(recipe.dataflow)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    rules = Rules.of(recipe, group_reward=group_reward)
    return Ledger(folder / LEDGER, rules, source, heldout, hooks=hooks, clock=clock, resume=resume)


def kept_bounds(recipe: Recipe) -> Bounds | None:
    """How many trajectories the run keeps for people; None where it keeps none."""
    kept = recipe.observe.trajectories
    most = {kind: getattr(kept, kind) for kind in KINDS}
    return Bounds(kept.max_bytes, most) if kept.max_bytes and any(most.values()) else None


async def serve(
    recipe: Recipe,
    folder: Path,
    token: str,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    on_ready: Callable[[str], None] = lambda url: None,
    resume: bool = False,
    group_reward: GroupReward | None = None,
) -> None:
    """Serve until cancelled; `on_ready` gets the URL. `resume` lets a run that was stopped go on."""
    ledger = open_ledger(recipe, folder, resume=resume, group_reward=group_reward is not None)
    bounds = kept_bounds(recipe)
    try:
        service = DataflowService(
            ledger,
            Journal(folder / METRICS),
            token,
            commit_interval=recipe.dataflow.commit_interval,
            invitation=Invitation(recipe, folder, Keyring.of_run(token)),
            hook_timeout=recipe.dataflow.hook_timeout,
            group_reward=group_reward,
            reward_timeout=recipe.rollout.reward_timeout,
            keep=None if bounds is None else (folder / FILE, bounds),
        )
        try:
            url = await service.start(host, port)
            keep_what_is_there()
            on_ready(url)
            await service.serve()
        finally:
            await service.stop()
    finally:
        ledger.close()
