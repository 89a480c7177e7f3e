"""Rewards of single decisions, given when an episode has been played.

A decision's reward is a process reward model's score, or the mean outcome of several continuations: the same policy
plays on from the state that the decision leads to. Invariants: every sampled answer gets a reward, 0.0 if it was
malformed; equal decisions from one state get equal rewards; a model that fails raises, so that no reward is made up.
Continuations and outcomes call tools again, so a tool must not keep state between calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from rillflow.agents.agentflow.planner import CONTINUATION, ROLE, AskedState, Decision, prm_row, without_results
from rillflow.agents.rewards.process import ProcessReward
from rillflow.agents.workflows.multi_policy import checker

if TYPE_CHECKING:
    from rillflow.agents.agentflow.loop import Flow, Position
    from rillflow.agents.agentflow.options import StepRewardOptions
    from rillflow.contracts import Episode

Rewards = Mapping[Decision, float]  # of the decisions sampled from one state

# One thread: however many episodes ask at once, the model is loaded once, and the node's other threads stay free.
_LOADER = ThreadPoolExecutor(1, "process-reward-loader")


async def play_rated(episode: Episode, flow: Flow, options: StepRewardOptions) -> Position:
    """Play an episode in which several decisions are sampled from each state, and reward each of them."""
    planner = flow.planner(ROLE, options.actions)
    visited: dict[str, Position] = {}
    at = await flow.begin()
    while not at.over:
        here = replace(at, memory=at.memory.copy())
        state = await planner.decide(flow.question, at.memory.text(), at.left, final=at.final)
        visited[state.prompt] = here
        at = await flow.advance(at, state.taken)
    outcomes = Outcomes(episode, flow)
    if options.continuations:
        found = await asyncio.gather(
            *(outcomes.continued(visited[state.prompt], state, options.continuations) for state in planner.states)
        )
        episode.metric("continuations", outcomes.played)
    else:
        found = await _scored(episode, flow, planner.states, options)
        if options.outcome:
            of_episode = await outcomes.of_answer(flow.answer(at))
            found = [
                await outcomes.mixed(rewards, state, visited[state.prompt], of_episode, options.outcome)
                for rewards, state in zip(found, planner.states, strict=True)
            ]
    for state, rewards in zip(planner.states, found, strict=True):
        _give(episode, state, rewards, options.least)
    return at


class Outcomes:
    """What decisions come to, by the reward that the recipe names in `options.check`, cut to 0 to 1."""

    def __init__(self, episode: Episode, flow: Flow) -> None:
        self._flow = flow
        self._check = None if flow.options.check is None else checker(episode, flow.options.check)
        self.played = 0  # continuations

    async def of_answer(self, answer: str | None) -> float:
        assert self._check is not None, "options that need an outcome are refused without `check`"
        return 0.0 if answer is None else min(1.0, max(0.0, await self._check(answer)))

    async def continued(self, at: Position, state: AskedState, count: int) -> dict[Decision, float]:
        """Return the mean outcome of `count` continuations of each decision; one that ends the episode has one."""

        async def mean(decision: Decision) -> float:
            if self._flow.ends(at, decision):
                return await self._of_end(at, decision)
            return fmean(await asyncio.gather(*(self._played(at, decision) for _ in range(count))))

        decisions = _decisions(state)
        return dict(zip(decisions, await asyncio.gather(*map(mean, decisions)), strict=True))

    async def _played(self, at: Position, decision: Decision) -> float:
        self.played += 1
        begun = await self._flow.advance(replace(at, memory=at.memory.copy()), decision)
        ended = await self._flow.play_on(begun, self._flow.planner(CONTINUATION))
        return await self.of_answer(self._flow.answer(ended))

    async def _of_end(self, at: Position, decision: Decision) -> float:
        """Return the outcome of a decision that ends the episode."""
        ended = await self._flow.advance(replace(at, memory=at.memory.copy()), decision)
        return await self.of_answer(self._flow.answer(ended))

    async def mixed(
        self, scores: Rewards, state: AskedState, at: Position, of_episode: float, weight: float
    ) -> dict[Decision, float]:
        """Return the rewards of the decisions of a state.

        A decision that ends the episode is worth its outcome, carried out or not. The one that was carried out has
        `weight` of the outcome of the episode. The others have only their score, an estimate of their outcome.
        """
        rewards = dict(scores)
        for decision, score in scores.items():
            if self._flow.ends(at, decision):
                rewards[decision] = await self._of_end(at, decision)
            elif decision == state.taken:
                rewards[decision] = (1 - weight) * score + weight * of_episode
        return rewards


async def _scored(
    episode: Episode, flow: Flow, states: Sequence[AskedState], options: StepRewardOptions
) -> list[dict[Decision, float]]:
    """Return the process reward model's scores of the decisions of each state."""
    assert options.model is not None, "options have either a model or continuations"
    decisions, taken, rows = [_decisions(state) for state in states], list[Decision](), []
    for state, here in zip(states, decisions, strict=True):
        text = state.prompt if options.results else without_results(flow.question, taken)
        rows += [prm_row(text, decision) for decision in here]
        taken += [state.taken] if state.taken is not None else []
    if not rows:
        return [{} for _ in states]
    loop = asyncio.get_running_loop()
    model = await loop.run_in_executor(_LOADER, ProcessReward.shared, options.model)
    scores = iter([score for (score,) in await model.score(rows, min(options.seconds, episode.seconds_left()))])
    return [{decision: next(scores) for decision in here} for here in decisions]


def _decisions(state: AskedState) -> list[Decision]:
    """Return the different decisions of a state, in the order in which they were sampled."""
    return list(dict.fromkeys(one.decision for one in state.sampled if one.decision is not None))


def _give(episode: Episode, state: AskedState, rewards: Rewards, least: float) -> None:
    """Reward each sampled answer. If the rewards hardly differ, all get their mean, so that noise is not learned."""
    values = [0.0 if one.decision is None else rewards[one.decision] for one in state.sampled]
    if pstdev(values) < least:
        values = [fmean(values)] * len(values)
    for one, value in zip(state.sampled, values, strict=True):
        episode.reward(value, call=one.said.call)
