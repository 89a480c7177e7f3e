"""The loop: planner, executor, verifier, memory, until the planner answers or the steps are used up.

The executor dispatches a decision to a tool; it calls no model and keeps no state. A mistake of the model is returned
as a result that begins with `error: `; only a tool that cannot be reached raises, as in the toolbox.

Invariants: an episode ends with an answer of the planner, with a fallback if the recipe wants one (the last result of a
tool), or with None; it never raises for what a model wrote. With `process_reward` every answer of the planner gets its
own reward; without it each carries the outcome of the episode (Flow-GRPO). An evaluation remembers nothing and rates
nothing.

The reward of a decision is the score of a process reward model, or the mean outcome of several continuations: the same
policy plays on from the state that the decision leads to. Every sampled answer gets a reward, 0.0 if it was malformed;
equal decisions from one state get equal rewards; a model that fails raises, so that no reward is made up. Continuations
and outcomes call tools again, so a tool must not keep state between calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from rillflow.agents.agentflow.models import (
    ANSWER,
    CONTINUATION,
    ROLE,
    THINK,
    AskedState,
    Decision,
    Planner,
    prm_row,
    verifier_of,
    without_results,
)
from rillflow.agents.agentflow.options import FlowOptions, read_options
from rillflow.agents.memory import EpisodeMemory, Memory, TaskMemory, store_of
from rillflow.agents.workflows.multi_policy import checker
from rillflow.contracts import Episode
from rillflow.errors import ConfigError
from rillflow.weights.model_folder import process_facts_of, require_ranking

if TYPE_CHECKING:
    from rillflow.agents.agentflow.options import StepRewardOptions
    from rillflow.config import Recipe
    from rillflow.contracts import Episode


_FAR = 0.1  # calibration error: 0.12 to 0.17 in models of balanced rows, 0.01 to 0.07 in others (docs/agentflow.md)


class Executor:
    """Executes decisions. `tools` names the tool of each action; an action without one (think, answer) is echoed."""

    def __init__(self, episode: Episode, tools: Mapping[str, str]) -> None:
        self._episode = episode
        self._tools = tools
        self._only = {schema["function"]["name"]: _only_argument(schema) for schema in episode.tools.schemas}

    async def execute(self, decision: Decision) -> str:
        tool = self._tools.get(decision.action)
        if tool is None:
            return decision.action_input
        argument = self._only.get(tool)
        arguments = decision.action_input if argument is None else {argument: decision.action_input}
        return await self._episode.tools.call(tool, arguments, self._episode)


def tools_of(episode: Episode, actions: Mapping[str, str] | None) -> dict[str, str]:
    """Return the tool of each action: as in the recipe, or every tool by its name. ConfigError for an unknown tool."""
    names = list(episode.tools.names())
    chosen = dict(actions) if actions is not None else {name: name for name in names}
    for action, tool in chosen.items():
        if action in (THINK, ANSWER):
            raise ConfigError(f"options.actions: {action} needs no tool", "leave it out: it is always available")
        if tool not in names:
            raise ConfigError(f"options.actions: unknown tool {tool}", f"`tools` has: {', '.join(names) or 'none'}")
    return chosen


def _only_argument(schema: Mapping[str, Any]) -> str | None:
    """Return the argument that takes the action's input as text, or None if the input is the arguments as JSON."""
    parameters = schema["function"].get("parameters") or {}
    known, required = parameters.get("properties") or {}, list(parameters.get("required") or ())
    texts = [name for name in (required or known) if known.get(name, {}).get("type") == "string"]
    return texts[0] if len(texts) == 1 and len(required) <= 1 else None


@dataclass(frozen=True, slots=True)
class Position:
    """The position of an episode. `final`: enough is known, only an answer is left; `fallback`: the last result of a
    tool. `over` with `answer` None: the planner did not answer."""

    memory: Memory
    left: int
    fallback: str | None = None
    final: bool = False
    over: bool = False
    answer: str | None = None


class Flow:
    """The rules of one episode: how a decision changes the position."""

    def __init__(self, episode: Episode, options: FlowOptions) -> None:
        self.question = str(episode.payload["question"])
        self.options = options
        self._episode = episode
        self._tools: Mapping[str, str] = tools_of(episode, options.actions)
        self._executor = Executor(episode, self._tools)
        self._verifier = verifier_of(episode, options)

    def planner(self, role: str, count: int = 1) -> Planner:
        return Planner(self._episode.role(role), self.options, [THINK, *self._tools, ANSWER], count)

    async def begin(self) -> Position:
        memory = memory_of(self._episode, self.options)
        await memory.begin(self.question)
        return Position(memory, self.options.max_steps)

    async def advance(self, at: Position, decision: Decision | None) -> Position:
        """Carry a decision out; None stands for a step that was given up. The memory of `at` is changed."""
        if decision is not None and decision.action == ANSWER:
            return replace(at, over=True, answer=decision.action_input)
        left = at.left - 1
        if decision is None:
            return replace(at, left=left, over=at.final or left == 0)
        result = await self._executor.execute(decision)
        at.memory.note(decision.action, decision.action_input, result)
        told = decision.action in self._tools and not result.startswith("error: ")
        enough = await self._verifier.sufficient(self.question, at.memory.text())
        fallback = result if told else at.fallback
        return replace(at, left=left, fallback=fallback, final=enough, over=left == 0 and not enough)

    def ends(self, at: Position, decision: Decision) -> bool:
        """Return whether the episode is over with this decision, whatever its result is."""
        return decision.action == ANSWER or (at.left == 1 and self.options.verifier == "none")

    async def play_on(self, at: Position, planner: Planner) -> Position:
        """Play to the end, carrying out the first of the decisions that `planner` samples from each state."""
        while not at.over:
            state = await planner.decide(self.question, at.memory.text(), at.left, final=at.final)
            at = await self.advance(at, state.taken)
        return at

    def answer(self, at: Position) -> str | None:
        """Return the answer of an episode that is over."""
        return at.fallback if at.answer is None and self.options.fallback else at.answer


async def play(episode: Episode) -> str | None:
    """Play one episode and return the final answer, for the recipe's reward."""
    options = read_options(episode.options)
    flow = Flow(episode, options)
    if options.process_reward is None or episode.evaluating:
        at = await flow.play_on(await flow.begin(), flow.planner(ROLE))
    else:
        at = await play_rated(episode, flow, options.process_reward)
    await at.memory.end(at.answer)
    return flow.answer(at)


def memory_of(episode: Episode, options: FlowOptions) -> Memory:
    if options.memory is None:
        return TaskMemory()
    return EpisodeMemory(store_of(options.memory), options.memory, writes=not episode.evaluating)


def check_recipe(recipe: Recipe) -> str | None:
    """Refuse, before a run starts, options that do not fit and a process reward model that is not fit for use. Return a
    warning of scores that are compared with outcomes and are on another scale."""
    options = read_options(recipe.options).process_reward
    if options is None:
        return None
    if options.continuations and CONTINUATION not in recipe.untrained:
        raise ConfigError(
            "options.process_reward.continuations: the continuations would be trained on",
            f"list {CONTINUATION} under `untrained`",
        )
    if options.actions > 1 and recipe.dataflow.grouping != "state":
        raise ConfigError(
            f"options.process_reward.actions={options.actions}: they are compared with each other",
            "set dataflow.grouping: state, or process_reward.actions: 1",
        )
    if options.model is None:
        return None
    if options.gate:
        require_ranking(options.model)
    return _warning_of_scale(options.model, options.outcome)


def _warning_of_scale(model: str, outcome: float) -> str | None:
    quality = process_facts_of(model).quality
    if not outcome or quality is None or quality.calibration <= _FAR:
        return None
    return (
        f"the scores of {model} are {quality.calibration:.2f} from their labels on average, and process_reward.outcome="
        f"{outcome:g} compares them with outcomes: planners learned less from such models. Label with --no-balance"
    )


# ---------------------------------------------------------------- rewards of single decisions

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
    from rillflow.agents.rewards.process import ProcessReward  # imports torch

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
