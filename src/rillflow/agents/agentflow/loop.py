"""The loop: planner, executor, verifier, memory, until the planner answers or the steps are used up.

The executor dispatches a decision to a tool; it calls no model and keeps no state. A mistake of the model is returned
as a result that begins with `error: `; only a tool that cannot be reached raises, as in the toolbox.

Invariants: an episode ends with an answer of the planner, with a fallback if the recipe wants one (the last result of a
tool), or with None; it never raises for what a model wrote. With `process_reward` every answer of the planner gets its
own reward (`step_rewards`); without it each carries the episode's outcome (Flow-GRPO). An evaluation remembers nothing
and rates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rillflow.agents.agentflow.options import FlowOptions, read_options
from rillflow.agents.agentflow.planner import ANSWER, CONTINUATION, ROLE, THINK, Decision, Planner
from rillflow.agents.agentflow.verifier import verifier_of
from rillflow.agents.memory import EpisodeMemory, Memory, TaskMemory, store_of
from rillflow.contracts import Episode
from rillflow.errors import ConfigError
from rillflow.weights.model_folder import require_ranking

if TYPE_CHECKING:
    from rillflow.config import Recipe


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
        from rillflow.agents.agentflow.step_rewards import play_rated

        at = await play_rated(episode, flow, options.process_reward)
    await at.memory.end(at.answer)
    return flow.answer(at)


def memory_of(episode: Episode, options: FlowOptions) -> Memory:
    if options.memory is None:
        return TaskMemory()
    return EpisodeMemory(store_of(options.memory), options.memory, writes=not episode.evaluating)


def check_recipe(recipe: Recipe) -> None:
    """Refuse, before a run starts, options that do not fit and a process reward model that is not fit for use."""
    options = read_options(recipe.options).process_reward
    if options is None:
        return
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
    if options.model is not None and options.gate:
        require_ranking(options.model)
