"""`openai-agents`: `Runner` with a function tool, on the responses API (its default) and on chat completions."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api
from stockroom import COUNT, MAX_TOKENS, MAX_TURNS, MODEL, Stock, report, stocks, turn

api, _, how = sys.argv[1].partition("-")


def make_agent(stock: Stock) -> Agent[Any]:
    @function_tool(description_override=COUNT)
    def count(box: str, item: str) -> str:
        return stock.count("count", {"box": box, "item": item})

    settings = ModelSettings(max_tokens=MAX_TOKENS)
    counter = Agent(name="counter", model=MODEL, tools=[count], model_settings=settings)
    if how != "handoff":
        return counter
    return Agent(name="desk", model=MODEL, handoffs=[counter], model_settings=settings)


async def play(stock: Stock) -> list[dict[str, Any]]:
    agent = make_agent(stock)
    if how == "stream":
        result: Any = Runner.run_streamed(agent, stock.question, max_turns=MAX_TURNS)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, stock.question, max_turns=MAX_TURNS)
    return [told(response.output) for response in result.raw_responses]


def told(items: list[Any]) -> dict[str, Any]:
    said = [part.text for item in items if item.type == "message" for part in item.content]
    calls = [(item.call_id, item.name, item.arguments) for item in items if item.type == "function_call"]
    return turn("".join(said), calls)


async def main() -> None:
    set_default_openai_api("chat_completions" if api == "chat" else "responses")
    report([await play(stock) for stock in stocks()])


asyncio.run(main())
