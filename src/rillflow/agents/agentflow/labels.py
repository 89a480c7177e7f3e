"""How good each step was, by what came of it: Monte-Carlo returns from our own rollouts, without any judge.

A step's label is the mean outcome of all episodes of its prompt that took the same decisions up to and with it. Where
no other episode did, that is its own outcome: unbiased, and a model that learns from many averages the rest away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from rillflow.agents.agentflow.actions import Decision
from rillflow.agents.agentflow.collect import Played
from rillflow.agents.agentflow.prm_text import prm_row

Prefix = tuple[str, tuple[Decision, ...]]


def label_by_returns(episodes: Sequence[Played]) -> list[dict[str, Any]]:
    """A row of `rillflow fit`'s process_reward for every episode. Outcomes outside 0 to 1 are cut to that."""
    outcomes: dict[Prefix, list[float]] = defaultdict(list)
    for episode in episodes:
        for prefix in _prefixes(episode):
            outcomes[prefix].append(min(1.0, max(0.0, episode.outcome)))
    means = {prefix: fmean(values) for prefix, values in outcomes.items()}
    return [
        prm_row(episode.question, episode.decisions, [means[prefix] for prefix in _prefixes(episode)])
        for episode in episodes
    ]


def split(episodes: Sequence[Played], every: int) -> tuple[list[Played], list[Played]]:
    """Those to learn from, and those of every n-th prompt, apart: no prompt is in both."""
    apart = set(sorted({episode.prompt for episode in episodes})[every - 1 :: every])
    return (
        [episode for episode in episodes if episode.prompt not in apart],
        [episode for episode in episodes if episode.prompt in apart],
    )


def _prefixes(episode: Played) -> Iterable[Prefix]:
    return [(episode.prompt, tuple(episode.decisions[: count + 1])) for count in range(len(episode.decisions))]
