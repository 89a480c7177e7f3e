"""Samplers pick which ready groups make the next batch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import xxhash

from rillflow.config import HookConfig
from rillflow.config.base import NonNegative, Positive
from rillflow.contracts import ReadyGroup, Replayer, Sampler
from rillflow.dataflow.hooks.base import Share, options
from rillflow.dataflow.rules import derive_seed

_seed_of_version = lru_cache(maxsize=64)(derive_seed)  # a pool has thousands of groups and one version


class Fifo:
    """First admitted, first served."""

    def pick(self, ready: Sequence[ReadyGroup], want: int) -> list[str]:
        return [group.id for group in sorted(ready, key=lambda group: group.order)[:want]]


class EarliestDeadline:
    """The groups that would pass the staleness bound first: the most stale first, then in order of admission.

    It goes by staleness, not by version: groups of several policies may be in one stream, each with its own count.
    """

    def pick(self, ready: Sequence[ReadyGroup], want: int) -> list[str]:
        by_deadline = sorted(ready, key=lambda group: (-group.staleness, group.order))
        return [group.id for group in by_deadline[:want]]


class Replay:
    """Serves int(groups * ratio) groups of each batch that were trained on before, none of them too old; the `fresh`
    sampler picks the others.

    `choose` is how: the latest, at random, or at random in proportion to the spread of their rewards times
    `discount` for every version of staleness. A draw depends on the seed, the group and the policy's version now, so
    a batch that is asked for again is the same, and nothing has to be remembered.
    """

    @options
    def __init__(
        self,
        *,
        ratio: Share,
        pool: Positive = 10_000,
        staleness: NonNegative = 8,
        choose: Literal["latest", "random", "prioritised"] = "latest",
        discount: Share = 0.9,
        seed: NonNegative = 0,
        fresh: str | dict[str, Any] = "earliest_deadline",
    ) -> None:
        self._ratio, self._pool, self._staleness = ratio, pool, staleness
        self._discount, self._seed = discount, seed
        self._rank = _RANKS[choose]
        self.fresh = _fresh(fresh)

    @property
    def pool(self) -> int:
        return self._pool

    @property
    def staleness(self) -> int:
        return self._staleness

    def pick(self, ready: Sequence[ReadyGroup], want: int) -> list[str]:
        return self.fresh.pick(ready, want)

    def replay(self, pool: Sequence[ReadyGroup], groups: int) -> list[str]:
        young = [group for group in pool if group.staleness <= self._staleness]
        first = heapq.nsmallest(
            int(groups * self._ratio),
            young,
            key=lambda group: (self._rank(self, group), group.staleness, -group.order),
        )
        return [group.id for group in first]

    def _draw(self, group: ReadyGroup) -> float:
        """Uniform in (0, 1], another one at every version."""
        seed = _seed_of_version(self._seed, "replay", group.oldest + group.staleness)
        return ((xxhash.xxh3_64_intdigest(group.id.encode(), seed) >> 11) + 1) / 2**53

    def _latest(self, group: ReadyGroup) -> float:
        return 0.0  # as good as any other: the youngest win

    def _random(self, group: ReadyGroup) -> float:
        return self._draw(group)

    def _prioritised(self, group: ReadyGroup) -> float:
        """The first k of these waiting times are a sample of k without replacement, in proportion to the weights."""
        weight = group.spread * self._discount**group.staleness
        return -math.log(self._draw(group)) / weight if weight > 0 else math.inf


_RANKS: dict[str, Callable[[Replay, ReadyGroup], float]] = {
    "latest": Replay._latest,
    "random": Replay._random,
    "prioritised": Replay._prioritised,
}


def _fresh(what: str | dict[str, Any]) -> Sampler:
    from rillflow.dataflow.hooks import SAMPLERS, build  # which names this module

    sampler: Sampler = build("sampler", HookConfig.model_validate(what), SAMPLERS)
    if isinstance(sampler, Replayer):
        raise ValueError("fresh must be a sampler that does not replay itself")
    return sampler
