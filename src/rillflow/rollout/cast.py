"""The parts that play a recipe's episodes: its player, reward, tools and environments, and the client of the agents.

A rollout node has one cast, and so has an evaluation; they differ in where the end of an episode goes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import openai

from rillflow.agents.rewards.registry import prepare_reward
from rillflow.config import Recipe, SamplingConfig
from rillflow.contracts import Clock
from rillflow.gateway.calls import Policy
from rillflow.gateway.feed import Feed
from rillflow.gateway.node_engines import NodeEngines
from rillflow.gateway.server import Gateway
from rillflow.gateway.sessions.events import SessionLog
from rillflow.gateway.trees.render import load_renderer
from rillflow.rollout.direct_client import DirectClient
from rillflow.rollout.episode import Reward, Surroundings, open_surroundings
from rillflow.rollout.episodes import Episodes
from rillflow.rollout.loading import load_reward
from rillflow.rollout.players import Player, load_player
from rillflow.rollout.push import Ends
from rillflow.rollout.rewards import LateRewards, RewardRules
from rillflow.wire.tokens import Keyring


class Cast(NamedTuple):
    recipe: Recipe
    player: Player
    reward: Reward | None
    surroundings: Surroundings
    client: DirectClient

    async def prepare(self) -> None:
        """Load what the reward needs before its first call, such as a model."""
        await prepare_reward(self.reward)

    def episodes(self, gateway: Gateway, ends: Ends, late: LateRewards, clock: Clock) -> Episodes:
        return Episodes(
            self.recipe.rollout,
            list(self.recipe.policies),
            player=self.player,
            reward=self.reward,
            gateway=gateway,
            client=self.client,
            pusher=ends,
            late=late,
            clock=clock,
            surroundings=self.surroundings,
            rules=RewardRules.of(self.recipe),
        )


@asynccontextmanager
async def open_cast(recipe: Recipe, feed: Feed, folder: Path) -> AsyncIterator[Cast]:
    """Open a cast. Commands get their folders inside `folder`. Close it after the gateway was stopped, so that no agent
    loses its tools before."""
    reward = load_reward(recipe)
    async with AsyncExitStack() as stack:
        player = load_player(recipe, feed, folder / "agents")
        stack.callback(player.close)
        surroundings, toolbox = await open_surroundings(recipe)
        stack.push_async_callback(toolbox.close)
        client = DirectClient(
            base_url="http://unset",
            api_key="unset",
            http_client=openai.DefaultAioHttpClient(timeout=None),
            max_retries=0,
        )
        stack.push_async_callback(client.close)
        yield Cast(recipe, player, reward, surroundings, client)


def build_gateway(
    recipe: Recipe,
    token: str,
    engines: NodeEngines,
    *,
    keyring: Keyring | None = None,
    sessions: SessionLog | None = None,
    clock: Clock | None = None,
) -> Gateway:
    """Return the gateway of a recipe. Without `sessions`, they are kept in memory."""
    policies = recipe.policies
    return Gateway(
        token,
        {n: Policy(engines.pools[n], load_renderer(p), p.tools, p.reasoning, name=n) for n, p in policies.items()},
        {n: _sampling(recipe, p.sampling) for n, p in policies.items()},
        limits=recipe.gateway,
        clock=clock,
        log=sessions,
        keyring=keyring,
    )


def _sampling(recipe: Recipe, given: SamplingConfig) -> SamplingConfig:
    """Return the sampling settings of a policy. A workflow belongs to the recipe, so its own settings win. A program
    that was written for another model may ask for anything, such as temperature 0, from which nothing is learnt."""
    return given.model_copy(update={"wins": given.wins or ("recipe" if recipe.workflow is None else "agent")})
