"""How good each decision was, by what came of it or by a judge's word, and the rows for `rillflow fit`.

A label belongs to a state and a decision. `by_continuations` takes the mean outcomes that a run with
`process_reward.continuations` gave to every sampled decision; `by_returns` the mean outcome of the run's own episodes
that took the decision in that state; `both` averages two ways of labelling. No label is made up: a decision without
one is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from statistics import fmean
from typing import Any

from rillflow.agents.agentflow.actions import Decision
from rillflow.agents.agentflow.collect import Played
from rillflow.agents.agentflow.prm_text import prm_row, without_results

Key = tuple[str, str, Decision]  # prompt's id, state, decision
Labels = Mapping[Key, float]

GOOD = 0.5  # a label from here on counts as good when classes are balanced


def by_returns(episodes: Iterable[Played]) -> Labels:
    """Label the decisions that were carried out. Outcomes outside 0 to 1 are cut to that."""
    return _means(
        ((episode.prompt, state.prompt, state.taken), episode.outcome)
        for episode in episodes
        for state in episode.states
    )


def by_continuations(episodes: Iterable[Played]) -> Labels:
    """Label every sampled decision by the reward that the run gave it."""
    return _means(
        ((episode.prompt, state.prompt, decision), reward)
        for episode in episodes
        for state in episode.states
        for decision, reward in state.decisions
        if reward is not None
    )


def both(first: Labels, second: Labels) -> Labels:
    """Average two labellings where both have a label; elsewhere take the one that has."""
    return {key: fmean(one[key] for one in (first, second) if key in one) for key in {**first, **second}}


def rows_of(episodes: Iterable[Played], labels: Labels, *, results: bool = True) -> list[dict[str, Any]]:
    """Return a row for every labelled decision. Without `results` the states lack those of earlier decisions."""
    rows: dict[Key, dict[str, Any]] = {}
    for episode in episodes:
        earlier: list[Decision] = []
        for state in episode.states:
            text = state.prompt if results else without_results(episode.question, earlier)
            for decision, _ in state.decisions:
                key = (episode.prompt, state.prompt, decision)
                if key in labels:
                    rows[key] = prm_row(text, decision, labels[key])
            earlier.append(state.taken)
    return list(rows.values())


def balanced(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with those of the rarer class repeated until good and bad labels are as many. Only for training:
    a model that sees one good decision among many bad ones learns to call all of them bad."""
    good = [row for row in rows if row["steps"][0]["label"] >= GOOD]
    bad = [row for row in rows if row["steps"][0]["label"] < GOOD]
    if not good or not bad:
        return list(rows)
    size = max(len(good), len(bad))
    return [row for pair in zip(islice(cycle(good), size), islice(cycle(bad), size), strict=True) for row in pair]


def split(episodes: Sequence[Played], every: int) -> tuple[list[Played], list[Played]]:
    """Those to learn from, and those of every n-th prompt, apart: no prompt is in both."""
    apart = set(sorted({episode.prompt for episode in episodes})[every - 1 :: every])
    return (
        [episode for episode in episodes if episode.prompt not in apart],
        [episode for episode in episodes if episode.prompt in apart],
    )


def _means(values: Iterable[tuple[Key, float]]) -> Labels:
    found: dict[Key, list[float]] = defaultdict(list)
    for key, value in values:
        found[key].append(min(1.0, max(0.0, value)))
    return {key: fmean(values) for key, values in found.items()}
