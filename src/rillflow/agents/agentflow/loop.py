"""The loop: planner, executor, verifier, memory, until somebody answers or the steps are used up.

Invariants: it ends with an answer of the planner, with a fallback (the last thing that a tool said), or with None; it
never raises for what a model wrote. With a process reward model every answer of the planner gets a reward of its own,
0.0 where it was malformed; without one each carries the episode's outcome (Flow-GRPO). Nothing is remembered of an
evaluation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from rillflow.agents.agentflow.actions import ANSWER, THINK
from rillflow.agents.agentflow.executor import Executor, tools_of
from rillflow.agents.agentflow.options import FlowOptions, read_options
from rillflow.agents.agentflow.planner import ROLE, Planner
from rillflow.agents.agentflow.prm_text import prm_row
from rillflow.agents.agentflow.verifier import verifier_of
from rillflow.agents.memory.episodes import EpisodeMemory, store_of
from rillflow.agents.memory.task import Memory, TaskMemory
from rillflow.agents.rewards.process import ProcessReward
from rillflow.contracts import Episode

# One thread: however many episodes ask at once, the model is loaded once, and the node's other threads stay free.
_LOADER = ThreadPoolExecutor(1, "process-reward-loader")


async def play(episode: Episode) -> str | None:
    """The final answer, for the recipe's reward."""
    options = read_options(episode.options)
    tools = tools_of(episode, options.actions)
    planner = Planner(episode.role(ROLE), options, [THINK, *tools, ANSWER])
    executor, verifier = Executor(episode, tools), verifier_of(episode, options)
    memory, question = memory_of(episode, options), str(episode.payload["question"])
    await memory.begin(question)
    answer = fallback = None
    for _ in range(options.max_steps):
        decision = await planner.decide(question, memory.text())
        if decision is None:
            continue
        if decision.action == ANSWER:
            answer = decision.action_input
            break
        result = await executor.execute(decision)
        memory.note(decision.action, decision.action_input, result)
        if decision.action in tools and not result.startswith("error: "):
            fallback = result
        if await verifier.sufficient(question, memory.text()):
            final = await planner.decide(question, memory.text(), final=True)
            answer = None if final is None else final.action_input
            break
    await memory.end(answer)
    await _reward_steps(episode, planner, question, options)
    return fallback if answer is None else answer


def memory_of(episode: Episode, options: FlowOptions) -> Memory:
    if options.memory is None:
        return TaskMemory()
    return EpisodeMemory(store_of(options.memory), options.memory, writes=not episode.evaluating)


async def _reward_steps(episode: Episode, planner: Planner, question: str, options: FlowOptions) -> None:
    """What the process reward model makes of each answer; a model that fails raises, so that nothing is made up."""
    if options.process_reward is None or episode.evaluating or not planner.steps:
        return
    decisions = [step.decision for step in planner.steps if step.decision is not None]
    scores: Iterator[float] = iter(())
    if decisions:
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(_LOADER, ProcessReward.shared, options.process_reward)
        (found,) = await model.score(
            [prm_row(question, decisions)], min(options.reward_seconds, episode.seconds_left())
        )
        scores = iter(found)
    for step in planner.steps:
        episode.reward(0.0 if step.decision is None else next(scores), call=step.said.call)
