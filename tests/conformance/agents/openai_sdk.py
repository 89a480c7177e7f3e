"""The `openai` package: chat completions, responses and completions, whole and streamed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import openai
from stockroom import CHAT_TOOLS, COUNT, MAX_TOKENS, MAX_TURNS, MODEL, PARAMETERS, Stock, report, stocks, turn

client = openai.OpenAI()
RESPONSE_TOOLS = [{"type": "function", "name": "count", "description": COUNT, "parameters": PARAMETERS}]


def chat(stock: Stock, ask: Callable[[list[Any]], Any]) -> list[dict[str, Any]]:
    messages: list[Any] = [{"role": "user", "content": stock.question}]
    turns = []
    for _ in range(MAX_TURNS):
        message = ask(messages).choices[0].message
        calls = message.tool_calls or []
        turns.append(turn(message.content, [(call.id, call.function.name, call.function.arguments) for call in calls]))
        if not calls:
            break
        messages.append(message)
        for call in calls:
            found = stock.count(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return turns


def chat_whole(messages: list[Any]) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS, max_tokens=MAX_TOKENS)


def chat_stream(messages: list[Any]) -> Any:
    asked = {"model": MODEL, "messages": messages, "tools": CHAT_TOOLS, "max_completion_tokens": MAX_TOKENS}
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert said == (final.choices[0].message.content or "")
    assert final.usage.completion_tokens > 0
    return final


def responses(stock: Stock, ask: Callable[..., Any], *, linked: bool) -> list[dict[str, Any]]:
    """`linked`: only what is new is sent, behind the last response's id; otherwise the whole history each time."""
    items: list[Any] = [{"role": "user", "content": stock.question}]
    turns, previous = [], {}
    for _ in range(MAX_TURNS):
        response = ask(model=MODEL, input=items, tools=RESPONSE_TOOLS, max_output_tokens=MAX_TOKENS, **previous)
        calls = [item for item in response.output if item.type == "function_call"]
        turns.append(turn(response.output_text, [(call.call_id, call.name, call.arguments) for call in calls]))
        if not calls:
            break
        found = [
            {"type": "function_call_output", "call_id": call.call_id, "output": stock.count(call.name, call.arguments)}
            for call in calls
        ]
        if linked:
            items, previous = found, {"previous_response_id": response.id}
        else:
            items = [*items, *response.output, *found]
    return turns


def response_stream(**asked: Any) -> Any:
    with client.responses.stream(**asked) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert said == final.output_text
    return final


def completions(stock: Stock, *, stream: bool) -> list[dict[str, Any]]:
    """An agent of the old kind: it writes the prompt and reads the tool calls itself."""
    prompt = f"<|im_start|>system\ncount(box, item)<|im_end|>\n<|im_start|>user\n{stock.question}<|im_end|>\n"
    turns = []
    for _ in range(MAX_TURNS):
        prompt += "<|im_start|>assistant\n"
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=MAX_TOKENS, stream=stream)
        text = "".join(part.choices[0].text for part in answer) if stream else answer.choices[0].text
        turns.append(turn(text, []))
        called = re.search(r'<tool_call>\{"name": "(\w+)", "arguments": (\{.*\})\}</tool_call>', text)
        if called is None:
            break
        found = stock.count(called[1], called[2])
        prompt += f"{text}<|im_end|>\n<|im_start|>tool\n<tool_response>{found}</tool_response><|im_end|>\n"
    return turns


PLAYS: dict[str, Callable[[Stock], list[dict[str, Any]]]] = {
    "chat": lambda stock: chat(stock, chat_whole),
    "chat-stream": lambda stock: chat(stock, chat_stream),
    "responses": lambda stock: responses(stock, client.responses.create, linked=False),
    "responses-linked": lambda stock: responses(stock, client.responses.create, linked=True),
    "responses-stream": lambda stock: responses(stock, response_stream, linked=False),
    "completions": lambda stock: completions(stock, stream=False),
    "completions-stream": lambda stock: completions(stock, stream=True),
}

report([PLAYS[sys.argv[1]](stock) for stock in stocks()])
