"""`langchain-openai`: a loop around `ChatOpenAI.bind_tools`, whole and streamed, on chat completions and responses."""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from stockroom import COUNT, MAX_TOKENS, MAX_TURNS, MODEL, Stock, report, stocks, turn

api, _, streamed = sys.argv[1].partition("-")
model = ChatOpenAI(model=MODEL, max_tokens=MAX_TOKENS, use_responses_api=api == "responses", stream_usage=True)


def ask(bound: Any, messages: list[Any]) -> Any:
    if not streamed:
        return bound.invoke(messages)
    chunks = list(bound.stream(messages))
    return sum(chunks[1:], chunks[0])


def play(stock: Stock) -> list[dict[str, Any]]:
    @tool(description=COUNT)
    def count(box: str, item: str) -> str:
        return stock.count("count", {"box": box, "item": item})

    bound = model.bind_tools([count])
    messages: list[Any] = [HumanMessage(stock.question)]
    turns = []
    for _ in range(MAX_TURNS):
        message = ask(bound, messages)
        turns.append(turn(message.text, [(call["id"], call["name"], call["args"]) for call in message.tool_calls]))
        assert message.usage_metadata["output_tokens"] > 0
        if not message.tool_calls:
            break
        messages += [message, *(count.invoke(call) for call in message.tool_calls)]
    return turns


report([play(stock) for stock in stocks()])
