"""Drop groups whose episodes all got the same reward: they carry no advantage and no gradient (dynamic sampling)."""

from __future__ import annotations

from rillflow.contracts import Group


class ZeroVariance:
    """Keeps groups of one, where there is no variance to speak of."""

    def keep(self, group: Group) -> bool | str:
        same = len(group.rewards) > 1 and min(group.rewards) == max(group.rewards)
        return "zero_variance" if same else True
