"""Running recipes and reading runs from Python. `rillflow` exports these names; see `docs/api.md`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rillflow.config import Recipe, load_recipe
from rillflow.errors import ConfigError, RunError
from rillflow.storage import read_json
from rillflow.storage.trajectories import Trajectories

if TYPE_CHECKING:
    from rillflow.runtime.folder import RunFolder

_STOPPED = 130  # the exit code of a run that was interrupted


@dataclass(frozen=True)
class Run:
    """A run that has finished. `folder` is the path of its run folder.

    Example:

        run = rillflow.run("quickstart")
        print(run.folder, run.summary["heldout"][-1]["reward"])
        for trajectory in run.trajectories(status="failed"):
            print(trajectory.info.cause)
    """

    folder: Path

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe that the run was started with."""
        return self._opened().recipe

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`: how the run ended, its steps, its rewards and its counts."""
        return dict(read_json(self.folder / "summary.json"))

    def trajectories(self, **filters: Any) -> Trajectories:
        """Return the kept trajectories; the filters are those of `rillflow.trajectories`."""
        return trajectories(self.folder, **filters)

    def _opened(self) -> RunFolder:
        from rillflow.runtime.folder import RunFolder

        return RunFolder.open(self.folder)


def run(
    recipe: str | Path | Recipe,
    *overrides: str,
    runs: str | Path = "runs",
    runtime: Literal["local", "ray"] = "local",
    address: str | None = None,
    dashboard: bool = True,
) -> Run:
    """Run a recipe to its end, as `rillflow run` does, and return the finished run.

    `recipe` is the name of a shipped recipe, the path of a YAML file, or a loaded `Recipe`. `overrides` are changes
    such as `trainer.steps=20`; they need a name or a path. A new run folder is made in `runs`. `runtime` and `address`
    choose this machine or a Ray cluster; `dashboard` offers the dashboard on loopback.

    The call blocks, shows its progress on standard error and leaves no process behind. ConfigError: the recipe cannot
    work; nothing was started. RunError: the run failed or was interrupted; its message names the run folder, and
    `rillflow.resume` goes on with it.

    Example:

        run = rillflow.run("quickstart", "trainer.steps=3", "seed=1")
        assert run.summary["steps"] == 3
    """
    if isinstance(recipe, Recipe) and overrides:
        raise ConfigError(
            "overrides need a recipe's name or path", "give them to `rillflow.load_recipe(name, overrides)` instead"
        )
    _refuse_event_loop("run")
    from rillflow.runtime.warm import early_server

    with early_server(wanted=runtime == "local") as early:  # imports torch while the recipe is read
        from rillflow.cli.run import Where, check, run_folder
        from rillflow.runtime.folder import RunFolder
        from rillflow.runtime.process import signals_held

        where = Where(runtime, address, early, dashboard)
        loaded = recipe if isinstance(recipe, Recipe) else load_recipe(str(recipe), (*where.overrides, *overrides))
        check(loaded)
        with signals_held():
            folder = RunFolder.create(loaded, Path(runs))
            return _finished(folder, run_folder(folder, where))


def resume(
    run: str | Path,
    *,
    runtime: Literal["local", "ray"] = "local",
    address: str | None = None,
    dashboard: bool = True,
) -> Run:
    """Go on with a run that was stopped, killed or failed, as `rillflow resume` does, and return the finished run.

    `run` is the path of its run folder. A run that has already finished is returned at once; to train on, raise
    `trainer.steps` or `evaluation.target` in its `recipe.yaml` first. The other arguments and the errors are those of
    `rillflow.run`.

    Example:

        run = rillflow.resume("runs/quickstart-20261118-033123")
        print(run.summary["steps"])
    """
    _refuse_event_loop("resume")
    from rillflow.runtime.folder import RunFolder
    from rillflow.runtime.warm import early_server

    folder = RunFolder.open(run)
    with early_server(wanted=runtime == "local") as early:
        from rillflow.cli.run import Where, check, has_finished, run_folder
        from rillflow.runtime.process import signals_held

        if has_finished(folder):
            return Run(folder.root)
        check(folder.recipe)
        with signals_held():
            return _finished(folder, run_folder(folder, Where(runtime, address, early, dashboard), resume=True))


def _finished(folder: RunFolder, code: int) -> Run:
    if code:
        state = "was stopped" if code == _STOPPED else f"failed: {folder.state()['reason']}"
        raise RunError(f"the run in {folder.root} {state}", f"`rillflow resume {folder.root}` goes on with it")
    return Run(folder.root)


def _refuse_event_loop(name: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RunError(
        f"rillflow.{name} blocks and was called from an event loop",
        f"use `await asyncio.to_thread(rillflow.{name}, …)`",
    )


def trajectories(
    run: str | Path,
    *,
    step: int | tuple[int | None, int | None] | None = None,
    policy: str | Iterable[str] | None = None,
    role: str | Iterable[str] | None = None,
    reward: tuple[float | None, float | None] | None = None,
    version: int | tuple[int | None, int | None] | None = None,
    status: str | Iterable[str] | None = None,
    lane: str | Iterable[str] | None = None,
    kept: str | Iterable[str] | None = None,
    prompt: str | Iterable[str] | None = None,
) -> Trajectories:
    """Return the trajectories that a run has kept; the run may be live or finished.

    `step` and `version` are a number or a pair (first, last); `reward` is a pair; None in a pair leaves that end open.
    A trajectory passes `version` if one of its trained tokens may have such a version. The other filters are one name
    or several.

    Example:

        for trajectory in rillflow.trajectories("runs/quickstart-20261118-033123", reward=(0.9, None)):
            print(trajectory.info.step, trajectory.messages()[-1])
    """
    return Trajectories(
        run,
        step=step,
        policy=policy,
        role=role,
        reward=reward,
        version=version,
        status=status,
        lane=lane,
        kept=kept,
        prompt=prompt,
    )
