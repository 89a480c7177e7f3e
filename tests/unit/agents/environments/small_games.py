"""Games for a worker process: one that counts, one that misbehaves on request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


class Counting:
    """Adds up; `die` ends its process, `hang` answers never, `print` prints, `raise` raises, `lie` answers nonsense."""

    def __init__(self) -> None:
        self._sum = 0

    def reset(self, payload: dict[str, Any], seed: int, options: dict[str, Any]) -> dict[str, Any]:
        self._sum = payload.get("from", seed)
        return {"text": str(self._sum), "info": {"pid": os.getpid()}, "plan": ["1", "2"]}

    def step(self, action: str) -> dict[str, Any]:
        if action == "die":
            os._exit(3)
        if action == "hang":
            time.sleep(3600)
        if action == "print":
            print("x" * 100_000)
        if action == "raise":
            raise RuntimeError("no such luck")
        if action == "lie":
            return {"texts": 1}
        self._sum += int(action) if action.isdigit() else 0
        return {"text": str(self._sum), "reward": 0.5}

    def ask(self, what: str, arguments: dict[str, Any]) -> Any:
        return {"what": what, **arguments}


def start() -> Callable[[], Counting]:
    return Counting


def refuse() -> Callable[[], Counting]:
    raise RuntimeError("not today")
