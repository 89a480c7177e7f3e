"""Drop groups of which too many episodes were cut off before they could end."""

from __future__ import annotations

from rillflow.contracts import Group
from rillflow.dataflow.hooks.options import Share, options


class Overlong:
    """Keeps a group while at most `share` of its episodes are truncated."""

    @options
    def __init__(self, *, share: Share = 0.5) -> None:
        self._share = share

    def keep(self, group: Group) -> bool | str:
        return "overlong" if sum(group.truncated) > self._share * len(group.truncated) else True
