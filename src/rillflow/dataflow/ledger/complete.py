"""A complete group: its episodes, their statistics, and what hooks see of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rillflow.dataflow.ledger.database import Database
from rillflow.dataflow.ledger.serving import spread
from rillflow.dataflow.ledger.shares import Statistics
from rillflow.dataflow.ledger.tables import Record
from rillflow.types import Prompt


@dataclass(frozen=True)
class CompleteGroup:
    """A complete group, as hooks see it: the episodes in which `policy` has trained tokens, in their places' order."""

    id: str
    prompt: Prompt
    policy: str
    rewards: Sequence[float]
    lengths: Sequence[int]
    truncated: Sequence[bool]
    staleness: int
    alike: Sequence[Sequence[float]] = ()  # rewards of what is compared, where that is not all of `rewards`

    @property
    def flat(self) -> bool:
        several = self._several()
        return bool(several) and all(min(rewards) == max(rewards) for rewards in several)

    @property
    def deviation(self) -> float:
        return max((spread(rewards)[1] for rewards in self._several()), default=math.inf)

    def _several(self) -> list[Sequence[float]]:
        return [rewards for rewards in (self.alike or [self.rewards]) if len(rewards) > 1]


class Episode(Record, frozen=True):
    """The samples with trained tokens of one policy in one task, or a single one of them."""

    policy: str
    place: int
    trained: int
    truncated: int
    reward: float
    oldest: int
    newest: int
    tokens: int
    live: int
    samples: int = 1

    @classmethod
    def of(cls, samples: Sequence[Episode]) -> Episode:
        """Return the episode of one task that has these samples."""
        if len(samples) == 1:
            return samples[0]
        return cls(
            samples[0].policy,
            samples[0].place,
            trained=sum(sample.trained for sample in samples),
            truncated=max(sample.truncated for sample in samples),
            reward=sum(sample.reward for sample in samples) / len(samples),
            oldest=min(sample.oldest for sample in samples),
            newest=max(sample.newest for sample in samples),
            tokens=sum(sample.tokens for sample in samples),
            live=min(sample.live for sample in samples),
            samples=len(samples),
        )


_SAMPLES = (
    "SELECT policy, place, trained, truncated, reward, oldest, newest, tokens, live FROM samples "
    "WHERE grp = ? AND trained > 0 ORDER BY place, n"
)


def episodes_of(db: Database, group: str) -> dict[str, list[Episode]]:
    """Return the episodes of a group by the policy that has sampled them, in the order of their places."""
    samples: dict[tuple[str, int], list[Episode]] = {}
    for sample in db.rows(Episode, _SAMPLES, (group,)):
        samples.setdefault((sample.policy, sample.place), []).append(sample)
    episodes: dict[str, list[Episode]] = {}
    for (policy, _), found in samples.items():
        episodes.setdefault(policy, []).append(Episode.of(found))
    return episodes


def statistics_of(episodes: Sequence[Episode]) -> Statistics:
    rewards = [episode.reward for episode in episodes]
    mean, std = spread(rewards)
    return Statistics(
        oldest=min(episode.oldest for episode in episodes),
        newest=max(episode.newest for episode in episodes),
        mean=mean,
        std=std,
        size=len(rewards),
        samples=sum(episode.samples for episode in episodes),
        tokens=sum(episode.tokens for episode in episodes),
    )
