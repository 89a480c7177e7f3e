"""`rillflow fit`: supervised training in one process, or in one process for each rank, with a line of progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rillflow.config.supervised import FitRecipe, read_resolved_fit
from rillflow.errors import RunError
from rillflow.observe.run_view import LiveLine, quieten, sparkline
from rillflow.observe.trackers import Outcome, Trackers, check_trackers
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.process import STOPPED, child_environment, prepare

if TYPE_CHECKING:
    from rillflow.trainer.parallel.launch import Place
    from rillflow.trainer.supervised.fit import Progress

console = Console(stderr=True)
INTERRUPTED = 130
_FIRST = ("loss", "accuracy", "ranking", "correlation", "auc", "perplexity", "grad_norm", "lr")


def check(recipe: FitRecipe) -> None:
    """Refuse a recipe that cannot work, before anything is created."""
    quieten()
    from rillflow.dataflow.sources import open_source
    from rillflow.trainer.graph.planner import plan
    from rillflow.trainer.supervised.functions import graph_of
    from rillflow.weights.model_folder import model_folder

    check_trackers(recipe)
    model_folder(recipe.model)
    plan(graph_of(recipe), ranks=recipe.trainer.teams)
    for source in (recipe.data.train, recipe.data.heldout):
        if source is not None:
            open_source(source, seed=recipe.seed, shuffle=False)


def fit_folder(folder: RunFolder) -> int:
    """Train to the end; the exit code: 0, or 130 when interrupted."""
    recipe = read_resolved_fit(folder.root / "recipe.yaml")
    console.print(f"[bold]{recipe.name}[/] in {folder.root}", highlight=False, soft_wrap=True)
    with folder.locked():
        folder.set_state("running")
        try:
            code = _train(folder, recipe) if recipe.trainer.ranks == 1 else _launch(folder, recipe)
        except BaseException as error:
            folder.set_state("failed", str(error))
            raise
        folder.set_state("finished" if code == 0 else "stopped")
    if code == INTERRUPTED:
        console.print(f"stopped; `rillflow fit --resume {folder.root}` goes on", highlight=False, soft_wrap=True)
    else:
        console.print(f"the model is in {folder.root / 'model'}", highlight=False, soft_wrap=True)
    return code


def fit_rank(folder: RunFolder, place: Place) -> int:
    """One rank's process; rank 0 shows the progress of all."""
    prepare()
    done = _fit(folder, read_resolved_fit(folder.root / "recipe.yaml"), place)
    return 0 if done else STOPPED


def _train(folder: RunFolder, recipe: FitRecipe) -> int:
    return 0 if _fit(folder, recipe, None) else INTERRUPTED


def _launch(folder: RunFolder, recipe: FitRecipe) -> int:
    from rillflow.runtime.forkserver import start_ranks
    from rillflow.trainer.parallel.launch import launch

    def arguments(rank: int, rendezvous: str) -> list[str]:
        place = ["--rank", str(rank), "--ranks", str(recipe.trainer.ranks), "--rendezvous", rendezvous]
        return ["fit", "--resume", str(folder.root), *place]

    code = launch(
        arguments,
        recipe.trainer.ranks,
        child_environment(recipe.runtime.threads),
        lambda rank: folder.log(f"rank-{rank}"),
        start_ranks(("rillflow.trainer.supervised.fit", "transformers.modeling_utils")),
    )
    if code not in (0, STOPPED):
        raise RunError(
            f"a rank ended with code {code}",
            f"the lines above say why; then `rillflow fit --resume {folder.root}` goes on from the last checkpoint",
        )
    return INTERRUPTED if code == STOPPED else 0


def _fit(folder: RunFolder, recipe: FitRecipe, place: Place | None) -> bool:
    from rillflow.dataflow.sources import open_source

    quieten()
    from rillflow.trainer.supervised.fit import run_fit

    train = open_source(recipe.data.train, seed=recipe.seed, shuffle=False)
    held = recipe.data.heldout
    heldout = None if held is None else open_source(held, seed=recipe.seed, shuffle=False)
    if place is not None and place.rank > 0:
        return run_fit(recipe, folder.root, train, heldout, place=place)
    with LiveLine(console) as live:
        view, tracking = View(recipe.name, live), Tracking(folder, live)

        def report(progress: Progress) -> None:
            view.show(progress)
            tracking.follow()

        outcome: Outcome = "failed"
        try:
            done = run_fit(recipe, folder.root, train, heldout, place=place, report=report)
            outcome = "finished" if done else "stopped"
        finally:
            tracking.close(outcome)
    return done


class Tracking:
    """The trackers of a fit. They begin with its first step: before, a run that goes on may take lines back."""

    def __init__(self, folder: RunFolder, live: LiveLine) -> None:
        self._folder = folder
        self._live = live
        self._trackers: Trackers | None = None

    def follow(self) -> None:
        """Start them, or say what they have to tell."""
        if self._trackers is None:
            self._trackers = Trackers(self._folder)
            self._trackers.start()
        self._say(self._trackers.news())

    def close(self, outcome: Outcome) -> None:
        """Let them send the rest."""
        if self._trackers is not None:
            self._say(self._trackers.close(outcome))

    def _say(self, news: Sequence[str]) -> None:
        for text in news:
            self._live.say(text)


class View:
    """The progress line of a fit."""

    def __init__(self, title: str, live: LiveLine) -> None:
        self._title = title
        self._live = live
        self._losses: list[float] = []
        self._heldout: Mapping[str, float] = {}

    def show(self, progress: Progress) -> None:
        self._losses.append(progress.values.get("loss", 0.0))
        fresh, self._heldout = progress.heldout is not self._heldout, progress.heldout
        due = fresh or progress.step == progress.steps
        self._live.show(_line(self._title, progress), due=due, drawn=sparkline(self._losses, 30))


def _line(title: str, progress: Progress) -> str:
    heldout = f"  held-out: {_numbers(progress.heldout)}" if progress.heldout else ""
    return f"{title}  step {progress.step}/{progress.steps}  {_numbers(progress.values)}{heldout}"


def _numbers(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {values[name]:.4g}" for name in _FIRST if name in values)


def new_folder(recipe: FitRecipe, runs: Path) -> RunFolder:
    check(recipe)
    return RunFolder.create(recipe, runs)
