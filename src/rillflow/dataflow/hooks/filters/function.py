"""A plain function as a filter: `def keep(group, **options) -> bool | str`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rillflow.contracts import Group


class FunctionFilter:
    """A filter that asks a function of the recipe, whose keyword arguments are the filter's options."""

    def __init__(self, function: Callable[..., bool | str], options: dict[str, Any]) -> None:
        self._function = function
        self._options = options

    def keep(self, group: Group) -> bool | str:
        return self._function(group, **self._options)
