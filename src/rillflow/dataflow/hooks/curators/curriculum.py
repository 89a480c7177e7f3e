"""Easy prompts first: a prompt is played while its difficulty is at most a limit that rises with the versions.

The difficulty is a number in the prompt's payload, or is learnt: 1 minus the mean reward of its latest group.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TypeGuard

from rillflow.config.base import Positive
from rillflow.contracts import Group
from rillflow.dataflow.hooks.keyed import KeyedState, of_prompt
from rillflow.dataflow.hooks.options import options
from rillflow.types import Prompt


class Curriculum(KeyedState):
    """A prompt of unknown difficulty is played. Of a prompt it keeps the difficulty learnt, if it is above `start`."""

    @options
    def __init__(self, *, start: float, end: float, versions: Positive, key: str | None = None) -> None:
        super().__init__()
        if end < start:
            raise ValueError(f"the limit rises: end must be at least start ({start}), not {end}")
        self._start, self._end, self._versions, self._key = start, end, versions, key

    @property
    def limit(self) -> float:
        """The most difficulty that is admitted now; `end` from `versions` on."""
        done = min(self.get("version", 0) / self._versions, 1.0)
        return self._end if done == 1.0 else self._start + (self._end - self._start) * done

    def admit(self, prompt: Prompt) -> bool:
        found = self.get(of_prompt(prompt.id)) if self._key is None else prompt.payload.get(self._key)
        return not _is_number(found) or found <= self.limit

    def observe(self, group: Group) -> None:
        if self._key is None:
            difficulty = 1.0 - fmean(group.rewards)
            self.put(of_prompt(group.prompt.id), difficulty if difficulty > self._start else None)

    def on_version(self, version: int) -> None:
        self.put("version", version)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
