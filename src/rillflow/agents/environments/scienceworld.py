"""ScienceWorld: thirty school experiments in a small town. A Java process plays one at a time.

A step's reward is its change of the score, which goes from 0 to 1; a spoiled experiment has the score -1. The splits
are the package's own variations for training and testing.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import groupby
from typing import Any

from rillflow.agents.environments.bases import Pooled, ask_library, rows, start_java
from rillflow.agents.environments.splits import check_split
from rillflow.errors import ConfigError

_UNKNOWN = ("No known action matches that input", "Unknown action", "Ambiguous request")
_ASK_SECONDS = 60.0


class ScienceWorld(Pooled):
    """A payload has `task` and `variation`, and may have `simplifications` (easy, or several separated by commas).

    All objects share one random state in the library, so a process plays one game. `timeout` is that of one call. With
    `list_actions` observations list all valid actions, which slows each step down.
    """

    def __init__(
        self,
        *,
        task: str = "find-living-thing",
        simplifications: str = "easy",
        steps: int = 100,
        gold: bool = False,
        list_actions: bool = False,
        workers: int = 4,
        timeout: float = 60.0,
    ) -> None:
        _check_installed()
        options = {
            "task": task,
            "simplifications": simplifications,
            "steps": steps,
            "gold": gold,
            "list_actions": list_actions,
        }
        super().__init__(f"{__name__}:start", workers=workers, games=1, timeout=timeout, options=options)


def start() -> Callable[[], ScienceGame]:
    """Start a Java machine in the worker process and return what makes games in it."""
    machine = start_java(importlib.import_module("scienceworld.constants").JAR_PATH)
    return lambda: ScienceGame(machine.scienceworld.runtime.pythonapi.PythonInterface())


class ScienceGame:
    """One game; `server` is the library's interface to it."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._score = 0.0
        self._taken = 0
        self._options: Mapping[str, Any] = {}

    def reset(self, payload: Mapping[str, Any], seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
        task = payload.get("task", options["task"])
        self._check_task(task)
        variation = int(payload.get("variation", seed % int(self._server.getTaskMaxVariations(task))))
        simplifications = payload.get("simplifications", options["simplifications"])
        self._server.load(task, variation, simplifications, options["gold"])
        self._server.reset()
        self._score, self._taken, self._options = 0.0, 0, options
        first = in_order(str(self._server.step("look around")).strip())
        plan = [str(action) for action in self._server.getGoldActionSequence()] if options["gold"] else []
        text = f"{str(self._server.getTaskDescription()).strip()}\n{first}"
        return {"text": text, "actions": self._actions(), "info": {"score": 0.0}, "plan": plan}

    def step(self, action: str) -> dict[str, Any]:
        text = in_order(str(self._server.step(action)).strip())
        self._taken += 1
        score = float(self._server.getScore())
        earned, self._score = score - self._score, score
        won = score >= 1.0
        done = won or score < 0 or bool(self._server.getCompleted()) or self._taken >= self._options["steps"]
        info: dict[str, Any] = {"score": score, "invalid": text.startswith(_UNKNOWN)}
        if done:
            info |= {"won": won, "steps": self._taken}
        actions = [] if done else self._actions()
        return {"text": text, "reward": earned, "done": done, "actions": actions, "info": info}

    def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """`variations` of a task: those for training, and those for testing."""
        task = arguments["task"]
        self._check_task(task)
        self._server.load(task, 0, "", False)
        return [list(self._server.getVariationsTrain()), list(self._server.getVariationsTest())]

    def _actions(self) -> list[str] | None:
        if not self._options["list_actions"]:
            return None
        return sorted({str(action) for action in self._server.getValidActionObjectCombinations()})

    def _check_task(self, task: Any) -> None:
        names = [str(name) for name in self._server.getTaskNames()]
        if task not in names:
            raise ConfigError(f"scienceworld has no task {task!r}", f"it has: {', '.join(names)}")


def in_order(text: str) -> str:
    """Return a text whose lists are sorted: the library lists the things in a room in a random order."""
    blocks = groupby(text.split("\n"), key=lambda line: line.startswith("\t"))
    return "\n".join(line for listed, block in blocks for line in (sorted(block) if listed else block))


def prompts(
    split: str, count: int, seed: int, task: str | list[str] = "find-living-thing", simplifications: str = "easy"
) -> Iterator[dict[str, Any]]:
    """Yield variations of a split; several tasks take turns."""
    check_split(split)
    _check_installed()
    tasks = [task] if isinstance(task, str) else task
    folds = {name: _variations(name)[split == "heldout"] for name in tasks}
    draw = random.Random(f"scienceworld/{split}/{seed}")

    def payloads() -> Iterator[dict[str, Any]]:
        turn = 0
        while True:
            name = tasks[turn % len(tasks)]
            yield {"task": name, "variation": draw.choice(folds[name]), "simplifications": simplifications}
            turn += 1

    yield from rows("scienceworld", payloads(), split, count, seed)


@cache
def _variations(task: str) -> list[list[int]]:
    found: list[list[int]] = ask_library(f"{__name__}:start", "variations", {"task": task}, _ASK_SECONDS)
    return found


def _check_installed() -> None:
    if importlib.util.find_spec("scienceworld") is None:
        raise ConfigError("scienceworld is not installed", "pip install rillflow[scienceworld]")
