"""Keep the groups for which an expression of the recipe is true, such as `mean(rewards) < 0.9 and staleness <= 2`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rillflow.contracts import Group
from rillflow.dataflow.hooks.filters.language import Expression as Parsed
from rillflow.dataflow.hooks.options import options

NAMES = ("rewards", "lengths", "truncated", "staleness", "prompt")


class Expression:
    """`prompt` is the payload; `reason` is what a drop is counted as. See `language` for what may be written."""

    @options
    def __init__(self, *, keep: str, reason: Annotated[str, Field(min_length=1)] = "expression") -> None:
        self._parsed = Parsed(keep, NAMES)
        self._reason = reason

    def keep(self, group: Group) -> bool | str:
        values = {
            "rewards": group.rewards,
            "lengths": group.lengths,
            "truncated": group.truncated,
            "staleness": group.staleness,
            "prompt": group.prompt.payload,
        }
        return True if self._parsed.value(values) else self._reason
