"""The trackers that a recipe can name, and those of a run together. Adding one touches the table `TRACKERS` and the
schema.

Packages that bring threads, exit hooks and processes with them run in a process of their own (`__main__`). The child
follows `metrics.jsonl`. It prints messages for the user, one JSON text a line, and ends when its input names the
outcome of the run, or when its parent is gone. A child that takes too long then is killed with its own children.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rillflow.config import Recipe
from rillflow.config.load import FIT, parse
from rillflow.config.runs import JsonlConfig, OpenTelemetryConfig, TrackersConfig
from rillflow.config.secrets import masked
from rillflow.config.supervised import FitRecipe, read_resolved_fit
from rillflow.errors import ConfigError
from rillflow.observe.trackers.feed import Feed, Follower, JsonLines, Outcome, Tracked, Tracker, unsent_lines
from rillflow.observe.trackers.services import Mlflow, SpanExport, TensorBoard, Wandb
from rillflow.runtime.folder import RunFolder

CLOSING = 30.0  # seconds that all trackers together have for the rest at the end of a run


class ChildTracker:
    """Starts the child, and has what a `Follower` has for those who start and end trackers."""

    def __init__(self, name: str, run: Path, metrics: Path, note: Path, log: Path) -> None:
        self.name = name
        self.news: list[str] = []
        self._command = [sys.executable, "-m", __package__, str(run), name]
        self._metrics, self._note, self._log = metrics, note, log
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, name=f"tracker-{name}", daemon=True)

    def start(self) -> None:
        try:
            with open(self._log, "a") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the run; and all that it starts can be killed with it
                )
        except OSError as error:
            self.news.append(f"tracker {self.name} could not be started: {error}")
            return
        self._reader.start()

    def stop(self, outcome: Outcome) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended already
                self._process.stdin.write(f"{outcome}\n")
                self._process.stdin.close()

    def join(self, seconds: float) -> None:
        if self._process is None:
            return
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._kill()
            code = None
            self.news.append(f"tracker {self.name} did not finish within {seconds:.0f} s")
        self._reader.join(1.0)
        if code:
            self.news.append(f"tracker {self.name} ended with code {code}; see {self._log}")
        if code != 0 and (left := unsent_lines(self._metrics, self._note)):
            self.news.append(f"tracker {self.name}: {left} could not be sent; `rillflow resume` sends the rest")

    def _kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.news.append(json.loads(line))


# ---------------------------------------------------------------- the trackers of a run


def _tensorboard(_: bool, run: Tracked) -> Tracker:
    return TensorBoard(run.folder / "tensorboard")


def _jsonl(settings: JsonlConfig, run: Tracked) -> Tracker:
    return JsonLines(Path(settings.path) if settings.path else run.folder / "trackers" / "scalars.jsonl")


# By the name in `observe.trackers`, given its settings there.
TRACKERS: dict[str, Callable[[Any, Tracked], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "jsonl": _jsonl,
}
_PACKAGES = ("wandb", "mlflow")  # extras of the same names; each runs in a process of its own


def chosen(settings: TrackersConfig) -> dict[str, Any]:
    """Return the settings of the trackers that a recipe names."""
    return {name: found for name in TRACKERS if (found := getattr(settings, name)) not in (None, False)}


def check_trackers(recipe: Recipe | FitRecipe) -> None:
    """ConfigError if the recipe names a tracker whose package is not installed."""
    trackers = chosen(recipe.observe.trackers)
    wanted = {f"trackers.{name}": (name, name) for name in trackers if name in _PACKAGES}
    if _spans_of(recipe) is not None:
        wanted["opentelemetry"] = ("opentelemetry.exporter", "otel")
    for key, (package, extra) in wanted.items():
        if not _installed(package):
            raise ConfigError(f"observe.{key} needs the package {package}", f"pip install 'rillflow[{extra}]'")


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _spans_of(recipe: Recipe | FitRecipe) -> OpenTelemetryConfig | None:
    return recipe.observe.opentelemetry if isinstance(recipe, Recipe) else None


def _recipe_of(folder: RunFolder) -> Recipe | FitRecipe:
    path = folder.root / "recipe.yaml"
    return read_resolved_fit(path) if FIT in parse(path) else folder.recipe


class Trackers:
    """The trackers of a run that this process supervises, at work from `start` until `close`."""

    def __init__(self, folder: RunFolder) -> None:
        recipe = _recipe_of(folder)
        self._feeds: list[Follower | ChildTracker] = [
            _child(folder, name) if name in _PACKAGES else feed_of(folder, name)
            for name in chosen(recipe.observe.trackers)
        ]
        if (spans := _spans_of(recipe)) is not None:
            self._feeds.append(SpanExport(spans.endpoint, folder.root, folder.ledgers))
        self._started = False

    def start(self) -> None:
        """Begin, once this process holds the run: two that send would repeat each other. More calls do nothing."""
        if not self._started:
            self._started = True
            for feed in self._feeds:
                feed.start()

    def news(self) -> list[str]:
        """Return the messages for the user since the last call."""
        found: list[str] = []
        for feed in self._feeds:
            while feed.news:
                found.append(feed.news.pop(0))
        return found

    def close(self, outcome: Outcome, seconds: float = CLOSING) -> list[str]:
        """Send the rest, for a limited time; return the messages for the user."""
        if not self._started:
            return []
        for feed in self._feeds:
            feed.stop(outcome)
        deadline = time.monotonic() + seconds
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
        return self.news()


def feed_of(folder: RunFolder, name: str, tell: Callable[[str], None] | None = None) -> Feed:
    """Return the feed of one tracker of a run, in this process."""
    recipe = _recipe_of(folder)
    settings = chosen(recipe.observe.trackers)[name]
    key = hashlib.blake2b(folder.token.encode(), digest_size=6).hexdigest()
    run = Tracked(folder.root.name, key, folder.root, masked(recipe.model_dump(mode="json")))
    several = isinstance(recipe, Recipe) and len(recipe.policies) > 1
    return Feed(name, _opener(name, settings, run), folder.metrics, _note(folder, name), several=several, tell=tell)


def _child(folder: RunFolder, name: str) -> ChildTracker:
    return ChildTracker(name, folder.root, folder.metrics, _note(folder, name), folder.log(f"tracker-{name}"))


def _note(folder: RunFolder, name: str) -> Path:
    return folder.root / "trackers" / f"{name}.json"


def _opener(name: str, settings: Any, run: Tracked) -> Callable[[dict[str, str]], Tracker]:
    return lambda ids: TRACKERS[name](settings, replace(run, ids=ids))
