"""Prompts that the policy solves time after time rest for a while."""

from __future__ import annotations

from statistics import fmean

from rillflow.config.base import Positive
from rillflow.contracts import Group
from rillflow.dataflow.hooks.keyed import KeyedState, of_prompt
from rillflow.dataflow.hooks.options import options
from rillflow.types import Prompt


class Solved(KeyedState):
    """A prompt solved `times` in a row (mean reward at least `threshold`) is passed over for its next `rest` visits.

    Then it is played once: solved again, it rests again; else it starts from the beginning. Of a prompt it keeps
    (solved in a row, visits left to rest), and nothing where both are 0.
    """

    @options
    def __init__(self, *, threshold: float = 1.0, times: Positive = 2, rest: Positive = 4) -> None:
        super().__init__()
        self._threshold, self._times, self._rest = threshold, times, rest

    def admit(self, prompt: Prompt) -> bool:
        row, left = self.get(of_prompt(prompt.id), (0, 0))
        if left == 0:
            return True
        self.put(of_prompt(prompt.id), [row, left - 1])
        return False

    def observe(self, group: Group) -> None:
        key = of_prompt(group.prompt.id)
        if fmean(group.rewards) < self._threshold:
            self.put(key, None)
            return
        row, left = self.get(key, (0, 0))
        row = min(row + 1, self._times)
        rests = row == self._times and left == 0  # a group that was in flight does not lengthen the rest
        self.put(key, [row, self._rest if rests else left])

    def on_version(self, version: int) -> None:
        """What is solved does not depend on the number of the version."""
