"""Filters decide whether a complete group is trained on. A filter returns True, or the reason of the drop."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from rillflow.config.base import NonNegative, Positive
from rillflow.contracts import Group
from rillflow.dataflow.hooks.base import Share, options


class ZeroVariance:
    """Drops groups in which all that is compared got the same reward: no advantage, no gradient (dynamic sampling).

    Scores of a model are never exactly equal: with `least`, rewards whose deviation is smaller count as the same. A
    group of one episode is kept.
    """

    @options
    def __init__(self, *, least: Annotated[float, Field(ge=0)] = 0.0) -> None:
        self._least = least

    def keep(self, group: Group) -> bool | str:
        flat = group.flat or (self._least > 0 and group.deviation < self._least)
        return "zero_variance" if flat else True


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


class Overlong:
    """Drops groups of which more than `share` of the episodes were cut off before they could end."""

    @options
    def __init__(self, *, share: Share = 0.5) -> None:
        self._share = share

    def keep(self, group: Group) -> bool | str:
        return "overlong" if sum(group.truncated) > self._share * len(group.truncated) else True


class Staleness:
    """Keeps a group whose oldest trained token is at most `most` versions behind when the group is complete: a stricter
    bound than the one at which groups expire."""

    @options
    def __init__(self, *, most: NonNegative) -> None:
        self._most = most

    def keep(self, group: Group) -> bool | str:
        return "stale" if group.staleness > self._most else True


class FunctionFilter:
    """A filter that asks a function of the recipe, whose keyword arguments are the filter's options."""

    def __init__(self, function: Callable[..., bool | str], options: dict[str, Any]) -> None:
        self._function = function
        self._options = options

    def keep(self, group: Group) -> bool | str:
        return self._function(group, **self._options)
