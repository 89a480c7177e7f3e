"""`litellm`: `acompletion` through its OpenAI and its Anthropic provider, whole and streamed."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import litellm
from stockroom import CHAT_TOOLS, MAX_TOKENS, MAX_TURNS, MODEL, Stock, report, stocks, turn

provider, _, streamed = sys.argv[1].partition("-")
BASE = {"openai": "OPENAI_BASE_URL", "anthropic": "ANTHROPIC_BASE_URL"}


async def ask(messages: list[Any]) -> Any:
    asked = {"model": f"{provider}/{MODEL}", "api_base": os.environ[BASE[provider]], "messages": messages}
    asked |= {"tools": CHAT_TOOLS, "max_tokens": MAX_TOKENS}
    if not streamed:
        return await litellm.acompletion(**asked)
    chunks = [chunk async for chunk in await litellm.acompletion(**asked, stream=True)]
    return litellm.stream_chunk_builder(chunks, messages)


async def play(stock: Stock) -> list[dict[str, Any]]:
    messages: list[Any] = [{"role": "user", "content": stock.question}]
    turns = []
    for _ in range(MAX_TURNS):
        message = (await ask(messages)).choices[0].message
        calls = message.tool_calls or []
        turns.append(turn(message.content, [(call.id, call.function.name, call.function.arguments) for call in calls]))
        if not calls:
            break
        messages.append(message.model_dump())
        for call in calls:
            found = stock.count(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return turns


async def main() -> None:
    report([await play(stock) for stock in stocks()])


asyncio.run(main())
