"""The dataflow process: builds ledger and service in a run's folder and serves until cancelled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rillflow.config import Recipe
from rillflow.contracts import Clock, GroupReward
from rillflow.dataflow.group_commit import Journal
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.rules import Rules
from rillflow.dataflow.service import DataflowService
from rillflow.dataflow.sources import open_heldout, open_sources
from rillflow.storage import disk_errors
from rillflow.storage.trajectories import Bounds
from rillflow.storage.trajectory_format import FILE, KINDS
from rillflow.types.runs import folder_of
from rillflow.weights.updates import Invitation
from rillflow.wire.blocking import keep_what_is_there
from rillflow.wire.tokens import Keyring

LEDGER, METRICS = "ledger.sqlite", "metrics.jsonl"


def open_ledger(
    recipe: Recipe,
    run: Path,
    *,
    ledger: int = 0,
    resume: bool = False,
    clock: Clock | None = None,
    group_reward: bool = False,
) -> Ledger:
    """The ledger of this number of the run in the folder `run`, new or as it was left. The first one evaluates."""
    data, folder = recipe.data, folder_of(run, ledger)
    source = open_sources(data.prompts, seed=recipe.seed, shuffle=data.shuffle)
    heldout = open_heldout(data.heldout, seed=recipe.seed) if ledger == 0 else None
    hooks = Hooks.of(recipe.dataflow)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    rules = Rules.of(recipe, group_reward=group_reward, ledger=ledger)
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
    ledger: int = 0,
    resume: bool = False,
    group_reward: GroupReward | None = None,
) -> None:
    """Serve the ledger of this number until cancelled; `on_ready` gets the URL. `resume` lets a run that was stopped go
    on. The first ledger keeps trajectories for people."""
    opened = open_ledger(recipe, folder, ledger=ledger, resume=resume, group_reward=group_reward is not None)
    bounds = kept_bounds(recipe) if ledger == 0 else None
    try:
        opened.db.reserve_log()
        service = DataflowService(
            opened,
            Journal(folder_of(folder, ledger) / METRICS),
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
        opened.close()
