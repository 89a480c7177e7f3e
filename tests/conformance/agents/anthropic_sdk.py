"""The `anthropic` package: messages with tools, whole and streamed."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from stockroom import COUNT, MAX_TOKENS, MAX_TURNS, MODEL, PARAMETERS, Stock, report, stocks, turn

client = anthropic.Anthropic()
TOOLS: list[Any] = [{"name": "count", "description": COUNT, "input_schema": PARAMETERS}]


def whole(messages: list[Any]) -> Any:
    return client.messages.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS)


def streamed(messages: list[Any]) -> Any:
    with client.messages.stream(model=MODEL, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == text_of(final)
    return final


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def play(stock: Stock, ask: Any) -> list[dict[str, Any]]:
    messages: list[Any] = [{"role": "user", "content": stock.question}]
    turns = []
    for _ in range(MAX_TURNS):
        counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS)
        message = ask(messages)
        assert message.usage.input_tokens == counted.input_tokens
        calls = [block for block in message.content if block.type == "tool_use"]
        turns.append(turn(text_of(message), [(call.id, call.name, call.input) for call in calls]))
        assert (message.stop_reason == "tool_use") == bool(calls)
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": stock.count(call.name, call.input)}
            for call in calls
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    return turns


asking = {"messages": whole, "messages-stream": streamed}[sys.argv[1]]
report([play(stock, asking) for stock in stocks()])
