"""Demonstrations by an environment's own gold player, in the form in which the workflow `game` records episodes.

The same arguments give the same rows, for `rillflow fit` with `task: sft`. Every demonstration wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from rillflow.agents.environments.registry import ENVIRONMENTS, environment_factory
from rillflow.agents.options import read_options
from rillflow.agents.workflows.game import GameOptions, observed, opening, spoken
from rillflow.config import resolve_object
from rillflow.errors import ConfigError


def demonstrations(
    environment: str,
    split: str,
    count: int,
    seed: int,
    *,
    options: Mapping[str, Any] | None = None,
    game: Mapping[str, Any] | None = None,
    prompts: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield rows for sft; `options` are the environment's, `game` the workflow's, `prompts` the generator's."""
    if environment not in ENVIRONMENTS or ENVIRONMENTS[environment].prompts is None:
        raise ConfigError(f"there are no lessons for {environment!r}", "name a shipped environment that makes prompts")
    made = environment_factory(environment, options or {})()
    generate = resolve_object(ENVIRONMENTS[environment].prompts or "")
    rows = generate(split=split, count=count, seed=seed, **(prompts or {}))
    with asyncio.Runner() as runner:
        played = _played(made, rows, read_options("game", game or {}, GameOptions))
        try:
            while (row := runner.run(anext(played, None))) is not None:
                yield row
        finally:
            runner.run(made.close())


async def _played(made: Any, rows: Iterator[dict[str, Any]], options: Any) -> AsyncIterator[dict[str, Any]]:
    if not hasattr(made, "plan"):
        raise ConfigError("the environment has no gold player", "write demonstrations yourself")
    for row in rows:
        seen = await made.reset(row["payload"], 0)
        messages = opening(seen, options)
        plan = await made.plan()
        earned = 0.0
        for action in plan:
            seen = await made.step(action)
            earned += seen.reward
            messages += [spoken(action, options), observed(seen, options)]
        if not plan or not seen.done or earned < 1.0:
            continue  # some gold paths of TextWorldExpress do not win
        yield {"id": row["id"], "payload": {"messages": messages[:-1]}}
