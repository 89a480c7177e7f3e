"""Drop groups in which all that is compared got the same reward: no advantage, no gradient (dynamic sampling)."""

from __future__ import annotations

from rillflow.contracts import Group


class ZeroVariance:
    """Keeps groups of one, where there is no variance to speak of."""

    def keep(self, group: Group) -> bool | str:
        return "zero_variance" if group.flat else True
