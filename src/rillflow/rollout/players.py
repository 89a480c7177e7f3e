"""Players of episodes: the user's workflow, a command, or agents from outside that ask for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rillflow.agents.command import CommandAgent
from rillflow.config import Recipe
from rillflow.gateway.feed import EndSession, Feed, Offer, OutsideTask
from rillflow.rollout.episode import EpisodeFailed, RunningEpisode, Workflow, play
from rillflow.rollout.loading import load_workflow

UNTAKEN_SECONDS = 10.0  # a task that no agent takes for so long goes back

Open = Callable[[], RunningEpisode]


class Played(NamedTuple):
    """The outcome of an episode: an answer for the reward function, a reward if one was given, the workflow's metrics,
    and the roles that it named. `end` is how it ended, if without an answer."""

    answer: Any
    reward: Any = None
    metrics: Mapping[str, float] = {}
    roles: frozenset[str] = frozenset()
    end: str = ""


class NotTaken(Exception):
    """The agent that asked for the task is gone: the task goes back and does not count as failed."""


class Player(Protocol):
    """Plays one episode in the session that `open_session` begins, or fails it with EpisodeFailed."""

    def wanted(self) -> int | None:
        """Return how many tasks agents wait for; None means as many as there is room for."""

    async def play(self, attempt: str, open_session: Open) -> Played: ...

    def over(self, attempt: str, *, accepted: bool, reason: str) -> None:
        """Learn that the run has the episode's end, or no longer wants it."""

    def close(self) -> None:
        """Stop: nothing is played after this."""


class WorkflowPlayer:
    """The user's async function, in this process. Without a reward function its answer is the reward."""

    def __init__(self, workflow: Workflow) -> None:
        self._workflow = workflow

    def wanted(self) -> int | None:
        return None

    async def play(self, attempt: str, open_session: Open) -> Played:
        episode = open_session()
        try:
            answer = await play(self._workflow, episode)
        finally:
            await episode.close()
        return Played(answer, answer, episode.metrics, frozenset(episode.roles))

    def over(self, attempt: str, *, accepted: bool, reason: str) -> None: ...

    def close(self) -> None: ...


class CommandPlayer:
    """A program, started once for each episode."""

    def __init__(self, agent: CommandAgent) -> None:
        self._agent = agent

    def wanted(self) -> int | None:
        return None

    async def play(self, attempt: str, open_session: Open) -> Played:
        return Played(await play(self._agent, open_session()))

    def over(self, attempt: str, *, accepted: bool, reason: str) -> None: ...

    def close(self) -> None:
        self._agent.close()


class OutsidePlayer:
    """Agents that take tasks from the feed. The session begins when one takes the task, not before."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def wanted(self) -> int | None:
        return self._feed.wanted()

    async def play(self, attempt: str, open_session: Open) -> Played:
        opened: list[RunningEpisode] = []

        def take() -> OutsideTask:
            if not opened:
                opened.append(open_session())
            return task_of(attempt, opened[0])

        offer = self._feed.offer(attempt, take)
        await asyncio.wait({offer.taken}, timeout=UNTAKEN_SECONDS)
        if not offer.taken.done():
            raise NotTaken
        return await self._ended(offer, opened[0].seconds_left())

    def expect(self, attempt: str, said: EndSession | None) -> None:
        """A session that an agent took from the node before this one, and perhaps ended there, may be ended now."""
        offer = self._feed.go_on(attempt)
        if said is not None:
            offer.ended.set_result(said)

    async def go_on(self, attempt: str, seconds: float) -> Played:
        """Play a session that is expected to its end."""
        return await self._ended(self._feed.go_on(attempt), seconds)

    async def _ended(self, offer: Offer, seconds: float) -> Played:
        await asyncio.wait({offer.ended}, timeout=max(seconds, 0.0))
        if not offer.ended.done():
            raise EpisodeFailed("timeout", f"the agent did not end its session within {seconds:.0f} s")
        said = offer.ended.result()
        if said.error is not None:
            raise EpisodeFailed("agent_error", said.error[:2000] or "the agent gave no reason")
        return Played(said.answer, said.reward)

    def over(self, attempt: str, *, accepted: bool, reason: str) -> None:
        self._feed.over(attempt, accepted=accepted, reason=reason)

    def close(self) -> None: ...


def task_of(attempt: str, episode: RunningEpisode) -> OutsideTask:
    return OutsideTask(
        session=attempt,
        api_key=episode.api_key,
        base_url=episode.base_url,
        anthropic_url=episode.anthropic_url,
        model=episode.model,
        policies=list(episode.policies),
        prompt=episode.prompt,
        seed=episode.seed,
        seconds=episode.seconds_left(),
    )


def load_player(recipe: Recipe, feed: Feed, folder: Path) -> Player:
    """Return the recipe's player. Commands get their folders inside `folder`."""
    if recipe.outside:
        return OutsidePlayer(feed)
    if recipe.command is not None:
        return CommandPlayer(CommandAgent(recipe.command, folder))
    return WorkflowPlayer(load_workflow(recipe))
