"""The games of TextWorldExpress: cookingworld, coin, twc, mapreader, arithmetic, sorting, simonsays, peckingorder.

One Java process plays many games, each with its own state. Games of `sorting` share state in the library, so that game
needs `games: 1`. A step's reward is its change of the score, whose maximum is 1; a lost game ends. The splits are the
package's own folds of seeds.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from rillflow.agents.environments.bases import Pooled, rows, start_java
from rillflow.agents.environments.splits import check_split
from rillflow.errors import ConfigError

GAMES = ("cookingworld", "coin", "twc", "mapreader", "arithmetic", "sorting", "simonsays", "peckingorder")
# The package's folds and their first seeds.
FOLDS = {"train": ("train", 0), "heldout": ("test", 20000)}
_SEEDS = 1000
_UNKNOWN = "Unknown action"


class TextWorldExpress(Pooled):
    """A payload has `game`, `world` (a seed), and optionally `fold` and `parameters` (numLocations=3,includeDoors=0).

    The options `game` and `parameters` are the defaults for payloads. `timeout` is that of one call.
    """

    def __init__(
        self,
        *,
        game: str = "coin",
        parameters: str = "",
        steps: int = 50,
        gold: bool = False,
        workers: int = 2,
        games: int = 32,
        timeout: float = 60.0,
    ) -> None:
        if importlib.util.find_spec("textworld_express") is None:
            raise ConfigError("textworld-express is not installed", "pip install rillflow[textworld]")
        _check_game(game)
        options = {"game": game, "parameters": parameters, "steps": steps, "gold": gold, "games": games}
        _check_alone(game, games)
        super().__init__(f"{__name__}:start", workers=workers, games=games, timeout=timeout, options=options)


def start() -> Callable[[], TextWorldGame]:
    """Start a Java machine in the worker process and return what makes games in it."""
    machine = start_java(importlib.import_module("textworld_express.constants").JAR_PATH)
    return lambda: TextWorldGame(machine.textworldexpress.runtime.PythonInterface())


class TextWorldGame:
    """One game; `server` is the library's interface to it."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._score = 0.0
        self._taken = 0
        self._steps = 1

    def reset(self, payload: Mapping[str, Any], seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
        game = payload.get("game", options["game"])
        _check_game(game)
        _check_alone(game, options["games"])
        parameters = payload.get("parameters", options["parameters"])
        if trouble := self._server.load(game, parameters):
            raise ConfigError(f"textworld-express refuses the game: {trouble}", "check its parameters")
        fold = payload.get("fold", "train")
        said = self._server.generateNewGameJSON(int(payload.get("world", seed)), fold, options["gold"])
        now = msgspec.json.decode(said)
        self._score, self._taken, self._steps = 0.0, 0, int(options["steps"])
        text = f"{self._server.getTaskDescription()}\n{now['observation'].strip()}"
        plan = [str(action) for action in self._server.getGoldActionSequence()] if options["gold"] else []
        return {"text": text, "actions": sorted(set(now["validActions"])), "info": {"score": 0.0}, "plan": plan}

    def step(self, action: str) -> dict[str, Any]:
        now = msgspec.json.decode(self._server.stepJSON(action))
        self._taken += 1
        score = float(now["score"])
        earned, self._score = score - self._score, score
        won = bool(now["tasksuccess"]) or score >= 1.0
        done = won or bool(now["taskfailure"]) or self._taken >= self._steps
        info: dict[str, Any] = {"score": score, "invalid": now["observation"].startswith(_UNKNOWN)}
        if done:
            info |= {"won": won, "steps": self._taken}
        actions = [] if done else sorted(set(now["validActions"]))
        return {"text": now["observation"].strip(), "reward": earned, "done": done, "actions": actions, "info": info}

    def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        raise ConfigError(f"textworld-express has no {what!r}", "it knows reset and step")


def prompts(
    split: str, count: int, seed: int, game: str | list[str] = "coin", parameters: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield games of a split; several kinds take turns."""
    check_split(split)
    games = [game] if isinstance(game, str) else game
    for name in games:
        _check_game(name)
    fold, first = FOLDS[split]
    draw = random.Random(f"textworld_express/{split}/{seed}")

    def payloads() -> Iterator[dict[str, Any]]:
        turn = 0
        while True:
            name = games[turn % len(games)]
            yield {"game": name, "fold": fold, "world": first + draw.randrange(_SEEDS), "parameters": parameters}
            turn += 1

    yield from rows("textworld_express", payloads(), split, count, seed)


def _check_game(game: Any) -> None:
    if game not in GAMES:
        raise ConfigError(f"textworld-express has no game {game!r}", f"it has: {', '.join(GAMES)}")


def _check_alone(game: str, games: int) -> None:
    if game == "sorting" and games > 1:
        raise ConfigError("games of `sorting` in one Java process disturb each other", "set the option games: 1")
