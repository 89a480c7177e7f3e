"""Shared code of the scripts beside this: the task on standard input, the stockroom's tool, and the report they leave.

They run where Rillflow is not installed, as anybody's agent would: all that they know of it is in the environment.
A turn of the report is what the package told its user about one answer of the model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MODEL = os.environ["RILLFLOW_MODEL"]
MAX_TURNS = 3
MAX_TOKENS = 32
COUNT = "Count the pieces of one item in one box."
PARAMETERS = {
    "type": "object",
    "properties": {"box": {"type": "string"}, "item": {"type": "string"}},
    "required": ["box", "item"],
}
CHAT_TOOLS = [{"type": "function", "function": {"name": "count", "description": COUNT, "parameters": PARAMETERS}}]


class Stock:
    """The boxes of one question; `count` is the real tool."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self.question: str = payload["question"]
        self._boxes: dict[str, dict[str, int]] = payload["stock"]

    def count(self, name: str, arguments: str | dict[str, Any]) -> str:
        if name != "count":
            return "error: no such tool"
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        found = self._boxes.get(str(given.get("box")), {}).get(str(given.get("item")))
        return "error: not there" if found is None else str(found)


def stocks() -> list[Stock]:
    return [Stock(payload) for payload in json.load(sys.stdin)["questions"]]


def turn(text: str | None, calls: list[tuple[str, str, str | dict[str, Any]]]) -> dict[str, Any]:
    """`calls` are (id, name, arguments)."""
    return {
        "text": text or "",
        "calls": [
            [id, name, json.loads(arguments) if isinstance(arguments, str) else arguments]
            for id, name, arguments in calls
        ],
    }


def report(played: list[list[dict[str, Any]]]) -> None:
    """Leave the turns of every question as the agent's answer."""
    Path(os.environ["RILLFLOW_ANSWER"]).write_text(json.dumps(played))
