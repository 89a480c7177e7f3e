"""The process in which a blocking library plays: `python -m rillflow.agents.environments.worker KIND`.

It reads questions from its standard input and answers them on its standard output, one at a time, until the input
ends; so it never outlives who started it. What the library prints goes to the standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from rillflow.agents.environments.frames import read_frame, write_frame
from rillflow.config import resolve_object
from rillflow.errors import RillflowError


class Game(Protocol):
    """One game of a library. What it returns is what `Observation` has, as a dict."""

    def reset(self, payload: dict[str, Any], seed: int, options: dict[str, Any]) -> dict[str, Any]: ...

    def step(self, action: str) -> dict[str, Any]: ...

    def ask(self, what: str, arguments: dict[str, Any]) -> Any:
        """Anything else that the library knows."""


Make = Callable[[], Game]


def serve(make: Make, questions: int, answers: int) -> None:
    """Each question names a seat; a seat's game is made when it is first asked for."""
    games: dict[int, Game] = {}
    while True:
        try:
            question = read_frame(questions, None)
        except EOFError:
            return
        try:
            seat = question["seat"]
            if seat not in games:
                games[seat] = make()
            answer = {"ok": _answer(games[seat], question)}
        except RillflowError as error:
            answer = {"error": error.message, "hint": error.hint, "kind": type(error).__name__}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:2000], "hint": "", "kind": "EnvironmentLost"}
        write_frame(answers, answer)


def _answer(game: Game, question: dict[str, Any]) -> Any:
    do = question["do"]
    if do == "reset":
        return game.reset(question["payload"], question["seed"], question["options"])
    if do == "step":
        return game.step(question["action"])
    return game.ask(do, question["arguments"])


def main(kind: str) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # a library that prints would break the protocol
    questions = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        make: Make = resolve_object(kind)()
    except Exception as error:
        write_frame(answers, {"error": f"{type(error).__name__}: {error}"[:2000]})
        return
    write_frame(answers, {"ok": None})
    serve(make, questions, answers)
    os._exit(0)  # a library's threads and clean-up have no say in it


if __name__ == "__main__":
    main(sys.argv[1])
