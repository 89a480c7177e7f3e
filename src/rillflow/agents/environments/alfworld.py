"""ALFWorld's own games; `folder` is the one that `alfworld-download` fills (it has `json_2.1.1` in it).

The package's TextWorld plays the games in worker processes. The reward is 1 when the game is won. The splits are the
package's: `train`, and `valid_unseen` as held out (rooms that no training game has).
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rillflow.agents.environments.bases import Pooled, rows
from rillflow.agents.environments.splits import check_split
from rillflow.errors import ConfigError

FOLDERS = {"train": "train", "heldout": "valid_unseen"}
_UNKNOWN = "Nothing happens"


class AlfWorld(Pooled):
    """A payload has `game`, the path of a game's folder below `json_2.1.1`."""

    def __init__(
        self,
        *,
        folder: str,
        steps: int = 50,
        gold: bool = False,
        workers: int = 4,
        games: int = 16,
        timeout: float = 60,
    ) -> None:
        if importlib.util.find_spec("alfworld") is None:
            raise ConfigError("alfworld is not installed", "pip install alfworld")
        home = _home(folder)
        options = {"home": str(home), "steps": steps, "gold": gold}
        super().__init__(f"{__name__}:start", workers=workers, games=games, timeout=timeout, options=options)


def start() -> Callable[[], AlfGame]:
    """Return what makes games, in the worker process."""
    textworld = importlib.import_module("textworld")
    package = importlib.import_module("alfworld.agents.environment.alfred_tw_env")

    def open_game(path: str, gold: bool) -> Any:
        wanted = textworld.EnvInfos(won=True, admissible_commands=True, extras=["expert_plan"] if gold else [])
        wrappers = [
            package.AlfredDemangler(shuffle=False),
            *([package.AlfredExpert(expert_type="planner")] if gold else []),
        ]
        return textworld.start(path, wanted, wrappers=wrappers)

    return lambda: AlfGame(open_game)


class AlfGame:
    """One game; `open_game` returns TextWorld's environment for a file."""

    def __init__(self, open_game: Callable[[str, bool], Any]) -> None:
        self._open_game = open_game
        self._game: Any = None
        self._taken = 0
        self._steps = 1

    def reset(self, payload: Mapping[str, Any], seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
        home = Path(options["home"])
        path = (home / str(payload["game"]) / "game.tw-pddl").resolve()
        if not path.is_relative_to(home.resolve()) or not path.is_file():
            raise ConfigError(f"there is no game {payload['game']!r} in {home}", "give a folder with a game.tw-pddl")
        if self._game is not None:
            self._game.close()
        self._game = self._open_game(str(path), bool(options["gold"]))
        state = self._game.reset()
        self._taken, self._steps = 0, int(options["steps"])
        plan = [str(action) for action in state.get("extra.expert_plan") or []] if options["gold"] else []
        return {"text": str(state.feedback).strip(), "actions": sorted(set(state.admissible_commands)), "plan": plan}

    def step(self, action: str) -> dict[str, Any]:
        state, _, over = self._game.step(action)
        self._taken += 1
        won = bool(state.won)
        done = won or bool(over) or self._taken >= self._steps
        text = str(state.feedback).strip()
        info: dict[str, Any] = {"invalid": text.startswith(_UNKNOWN)}
        if done:
            info |= {"won": won, "steps": self._taken}
        actions = [] if done else sorted(set(state.admissible_commands))
        return {"text": text, "reward": float(won), "done": done, "actions": actions, "info": info}

    def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        raise ConfigError(f"alfworld has no {what!r}", "it knows reset and step")


def prompts(split: str, count: int, seed: int, folder: str = "") -> Iterator[dict[str, Any]]:
    check_split(split)
    games = _games(str(_home(folder)), FOLDERS[split])
    draw = random.Random(f"alfworld/{split}/{seed}")
    payloads = ({"game": draw.choice(games)} for _ in range(count))
    yield from rows("alfworld", payloads, split, count, seed)


@lru_cache(maxsize=4)
def _games(home: str, part: str) -> list[str]:
    found = sorted(str(path.parent.relative_to(home)) for path in (Path(home) / part).rglob("game.tw-pddl"))
    found = [game for game in found if "movable" not in game and "Sliced" not in game]
    if not found:
        raise ConfigError(f"{home} has no games below {part}", "run alfworld-download and give its folder")
    return found


def _home(folder: str) -> Path:
    home = Path(folder).expanduser()
    for place in (home / "json_2.1.1", home):
        if (place / "train").is_dir():
            return place.resolve()
    raise ConfigError(f"{home} is not ALFWorld's data folder", "run alfworld-download and give its folder")
