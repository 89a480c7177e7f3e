"""Drop groups in which all that is compared got the same reward: no advantage, no gradient (dynamic sampling).

Scores of a model are never exactly equal: with `least` those whose deviation is smaller count as the same.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rillflow.contracts import Group
from rillflow.dataflow.hooks.options import options


class ZeroVariance:
    """Keeps groups of one, where there is no variance to speak of."""

    @options
    def __init__(self, *, least: Annotated[float, Field(ge=0)] = 0.0) -> None:
        self._least = least

    def keep(self, group: Group) -> bool | str:
        flat = group.flat or (self._least > 0 and group.deviation < self._least)
        return "zero_variance" if flat else True
