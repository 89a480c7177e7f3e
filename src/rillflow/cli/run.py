"""`rillflow run` and `rillflow resume`: the run, its live view, and what is printed at its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from rillflow.cli.reports import draw_timeline
from rillflow.config import PolicyConfig, Recipe
from rillflow.errors import ConfigError, RunError
from rillflow.observe.advisories import FactReader, advise
from rillflow.observe.advisories.rules import Watch
from rillflow.observe.metrics import plot_reward, read_metrics, summarise, summary_table
from rillflow.observe.run_view import Progress
from rillflow.observe.trackers import Outcome, Trackers, check_trackers
from rillflow.resources.workers import initial_workers
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.local import LocalRun, ended_well
from rillflow.runtime.warm import EarlyServer
from rillflow.storage import write_json
from rillflow.storage.startup import Starting
from rillflow.types import DONE, TARGET_REACHED, Status

console = Console(stderr=True)
INTERRUPTED = 130


@dataclass(frozen=True)
class Where:
    """The place of a run's processes: this machine, with a fork server that may already run, or a Ray cluster, at an
    address or started for the run."""

    runtime: Literal["local", "ray"] = "local"
    address: str | None = None
    early: EarlyServer | None = None
    dashboard: bool = True

    def __post_init__(self) -> None:
        if self.address is not None and self.runtime != "ray":
            raise ConfigError("--address is that of a Ray cluster", "give --runtime ray with it")

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides that a recipe needs to run there."""
        return ("runtime.weights_server=true",) if self.runtime == "ray" else ()

    def run_of(
        self,
        folder: RunFolder,
        on_status: Callable[[Status], None],
        on_starting: Callable[[list[Starting]], None],
        on_dashboard: Callable[[str], None],
        *,
        resume: bool,
    ) -> LocalRun:
        seen = on_dashboard if self.dashboard else None
        if self.runtime == "local":
            return LocalRun(
                folder, on_status, resume=resume, on_starting=on_starting, on_dashboard=seen, early=self.early
            )
        from rillflow.runtime.ray_run import RayRun

        return RayRun(
            folder, on_status, resume=resume, on_starting=on_starting, on_dashboard=seen, address=self.address
        )


def show_recipe(recipe: BaseModel) -> None:
    print(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), end="")


def check(recipe: Recipe) -> None:
    """Refuse a recipe that cannot work, before anything is started."""
    from rillflow.agents.tools.toolbox import check_tools
    from rillflow.cli.leakage import warning_of
    from rillflow.dataflow.hooks.running import Hooks
    from rillflow.dataflow.sources import open_heldout, open_sources
    from rillflow.resources.placement import plan
    from rillflow.rollout.loading import check_players
    from rillflow.weights.model_folder import model_folder

    warnings = [check_players(recipe)]
    check_tools(recipe.tools)
    check_trackers(recipe)
    plan(recipe, initial_workers(recipe))
    for policy in recipe.policies.values():
        kl, critic = policy.trainer.kl, policy.trainer.critic
        for model in (policy.model, kl.reference if kl else None, critic.model if critic else None):
            if model is not None:
                model_folder(model)
        for stage in policy.stages.values():
            if stage.model is not None:
                model_folder(stage.model)
    if any(may_not_plan(policy) for policy in recipe.policies.values()):
        from rillflow.stages import check_stages  # loads torch

        check_stages(recipe)
    Hooks.of(recipe.dataflow)
    prompts = open_sources(recipe.data.prompts, seed=recipe.seed, shuffle=False)
    warnings.append(warning_of(prompts, open_heldout(recipe.data.heldout, seed=recipe.seed)))
    for warning in filter(None, warnings):
        console.print(f"[yellow]warning:[/] {warning}", highlight=False, soft_wrap=True)


def may_not_plan(policy: PolicyConfig) -> bool:
    """Return whether the step graph of a trainer has to be planned to know that it can be.

    The graphs of the built-in algorithms can be, unless the recipe adds nodes, a loss or stages. Options that exclude
    each other concern a critic (`ppo`) and rewards of single answers.
    """
    trainer = policy.trainer
    own = trainer.graph is not None or bool(trainer.nodes) or trainer.loss is not None
    return own or trainer.algorithm == "ppo" or trainer.by_steps or bool(policy.stages)


def has_finished(folder: RunFolder) -> bool:
    """Return whether a run has nothing left to do. A finished run can be given more steps or a higher target."""
    state, recipe = folder.state(), folder.recipe
    if state["state"] != "finished":
        return False
    metrics = read_metrics(folder.metrics, recipe.policy)
    reached = metrics.reached(recipe.evaluation.target) is not None
    done = all(len(metrics.of(name)) >= policy.trainer.steps for name, policy in recipe.policies.items())
    return reached or done or state["reason"] not in (DONE, TARGET_REACHED)


def how_to_train_on(folder: RunFolder) -> str:
    """Return what to change in the recipe of a finished run in order to train on."""
    setting = "evaluation.target" if folder.state()["reason"] == TARGET_REACHED else "trainer.steps"
    return f"raise {setting} in {folder.root / 'recipe.yaml'}"


def run_folder(folder: RunFolder, where: Where | None = None, *, resume: bool = False) -> int:
    """Run to the end; returns the exit code: 0 for a good end, 1 for a bad one, 130 when interrupted."""
    recipe = folder.recipe
    console.print(f"[bold]{recipe.name}[/] in {folder.root}", highlight=False, soft_wrap=True)
    trackers = Trackers(folder)
    outcome: Outcome = "failed"
    started, since = time.monotonic(), time.time()
    try:
        with ExitStack() as stack:
            progress = stack.enter_context(Progress(recipe.name, target=recipe.evaluation.target))
            doors = Doors(folder, progress.say)
            watch = stack.enter_context(closing(Watch(folder, progress.say)))

            def on_status(status: Status) -> None:
                doors.show()
                progress.show(status)
                watch.look(status)
                trackers.start()
                for news in trackers.news():
                    progress.say(news)

            def on_dashboard(base: str) -> None:
                progress.say(f"dashboard: {folder.dashboard_url(base)}")

            run = (where or Where()).run_of(folder, on_status, progress.starting, on_dashboard, resume=resume)
            status = asyncio.run(run.run())
        outcome = "stopped" if status is None else "finished" if ended_well(status) else "failed"
    except RunError as error:
        raise RunError(error.message, f"{error.hint}; then `rillflow resume {folder.root}` goes on") from error
    finally:
        for news in trackers.close(outcome):
            console.print(news, highlight=False, markup=False, soft_wrap=True)
    if status is None:
        console.print(f"stopped; `rillflow resume {folder.root}` goes on where it was", highlight=False, soft_wrap=True)
        return INTERRUPTED
    return _conclude(folder, status, time.monotonic() - started, since)


class Doors:
    """Says where agents from outside connect, once each node has its gateway, and again when it has moved."""

    def __init__(self, folder: RunFolder, say: Callable[[str], None]) -> None:
        recipe = folder.recipe
        self._folder = folder
        self._say = say
        nodes = [worker.name for worker in initial_workers(recipe) if "rollout" in worker.tags]
        self._nodes = nodes if recipe.outside else []
        self._known: dict[str, str] = {}

    def show(self) -> None:
        for node in self._nodes:
            url = self._folder.endpoint(node)
            if url is not None and url != self._known.get(node):
                self._known[node] = url
                self._say(f"agents connect at {url} (POST /sessions, GET /feed) with the node token (`rillflow token`)")


def _conclude(folder: RunFolder, status: Status, seconds: float, since: float) -> int:
    recipe = folder.recipe
    metrics = read_metrics(folder.metrics, recipe.policy)
    advisories = advise(FactReader(folder).read(status, now=time.time()))
    summary = summarise(metrics, status, seconds, since, target=recipe.evaluation.target, advisories=advisories)
    write_json(folder.root / "summary.json", summary)
    plot = folder.root / "reward.png" if recipe.observe.plot and metrics.steps else None
    if plot is not None:
        plot_reward(metrics, list(recipe.policies), plot, recipe.name)
        draw_timeline(folder)
    console.print(summary_table(summary, folder.root, plot))
    if ended_well(status):
        if summary["target"] is not None and not summary["target"]["reached"]:
            console.print(_missed(summary, folder), highlight=False, soft_wrap=True)
        return 0
    console.print(Text.assemble(("the run failed: ", "bold red"), status.reason), soft_wrap=True)
    console.print(Text.assemble(("what to do: ", "bold"), f"the logs are in {folder.root / 'logs'}"), soft_wrap=True)
    return 1


def _missed(summary: dict[str, Any], folder: RunFolder) -> str:
    """Return a note on a run that has done its steps below its target."""
    target, steps = summary["target"]["reward"], summary["steps"]
    rewards = [found["reward"] for found in summary["heldout"] if found["reward"] is not None]
    best = f"the best was {max(rewards):.3f}" if rewards else "no evaluation has a reward"
    return (
        f"the held-out reward did not reach its target {target:g} within {steps} steps: {best}\n"
        f"to train on, {how_to_train_on(folder)}, then `rillflow resume {folder.root}`"
    )
