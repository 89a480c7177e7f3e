"""An agent for the stockroom as a plain program that uses only the OpenAI client and the tool's code.

It reads the prompt's payload from standard input and writes its answer to the file $RILLFLOW_ANSWER:

    command: python -m rillflow.examples.stockroom_agent
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from rillflow.examples.stockroom import MAX_TURNS, TOOLS, count


async def solve(client: AsyncOpenAI, model: str, payload: dict[str, Any]) -> str | None:
    """Ask the question, serve the tool calls, and return the final answer. None means that no answer came."""
    messages: list[Any] = [{"role": "user", "content": payload["question"]}]
    for _ in range(MAX_TURNS):
        response = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=32)
        message = response.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = count(payload, call.function.arguments) if call.type == "function" else "error: no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def main() -> None:
    # The client reads its URL and key from the environment.
    answer = asyncio.run(solve(AsyncOpenAI(), os.environ["OPENAI_MODEL"], json.load(sys.stdin)))
    Path(os.environ["RILLFLOW_ANSWER"]).write_text(answer or "")


if __name__ == "__main__":
    main()
