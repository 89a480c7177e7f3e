"""An outside agent for the stockroom: a separate program that takes tasks from a running gateway.

python -m rillflow.examples.stockroom_outside http://127.0.0.1:8123 RUN/run.json --capacity 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from openai import AsyncOpenAI, OpenAIError

from rillflow.agents.outside import Feed
from rillflow.examples.stockroom_agent import solve
from rillflow.gateway.feed import OutsideTask

RETRIES = 20  # of one call; enough to outlast a restart of the gateway


async def play(feed: Feed, task: OutsideTask) -> None:
    """Play one task with a client that takes a URL and a key."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=RETRIES) as client:
        try:
            answer = await solve(client, task.model, task.prompt.payload)
        except OpenAIError as error:
            ended = await feed.end(task, error=str(error))
        else:
            ended = await feed.end(task, answer=answer or "")
    print(f"{task.session}: {'taken' if ended.accepted else ended.reason}", flush=True)


async def run(url: str, token: str, capacity: int) -> None:
    """Play tasks, at most `capacity` at once, until the run ends."""
    playing: set[asyncio.Task[None]] = set()
    async with Feed(url, token, capacity=capacity) as feed:
        async for task in feed:
            playing = {one for one in playing if not one.done()} | {asyncio.create_task(play(feed, task))}
        for one in playing:  # the run has ended and needs no more answers
            one.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="the gateway's URL, as `rillflow run` prints it")
    parser.add_argument("run", type=Path, help="path of the run's run.json, which holds its token")
    parser.add_argument("--capacity", type=int, default=8, help="tasks at once")
    options = parser.parse_args()
    asyncio.run(run(options.url, json.loads(options.run.read_text())["token"], options.capacity))


if __name__ == "__main__":
    main()
