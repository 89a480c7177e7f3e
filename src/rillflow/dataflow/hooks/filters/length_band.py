"""Drop groups whose answers are, on average, too short or too long."""

from __future__ import annotations

from statistics import fmean

from rillflow.config.base import NonNegative, Positive
from rillflow.contracts import Group
from rillflow.dataflow.hooks.options import options


class LengthBand:
    """Keeps a group whose episodes have on average `shortest` to `longest` trained tokens, both included."""

    @options
    def __init__(self, *, shortest: NonNegative = 0, longest: Positive | None = None) -> None:
        if longest is not None and longest < shortest:
            raise ValueError(f"longest ({longest}) must be at least shortest ({shortest})")
        self._shortest, self._longest = shortest, longest

    def keep(self, group: Group) -> bool | str:
        length = fmean(group.lengths)
        if length < self._shortest:
            return "too_short"
        return "too_long" if self._longest is not None and length > self._longest else True
