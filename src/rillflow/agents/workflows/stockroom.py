"""One episode of the stockroom task, written against the plain OpenAI client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rillflow.agents.environments.stockroom import TOOLS, count

if TYPE_CHECKING:
    from rillflow.contracts import Episode

MAX_TURNS = 3


async def play(episode: Episode) -> str | None:
    """Ask the question, serve the tool calls, and return the final answer (None if there was none)."""
    messages: list[Any] = [{"role": "user", "content": episode.payload["question"]}]
    for _ in range(MAX_TURNS):
        response = await episode.client.chat.completions.create(
            model=episode.model, messages=messages, tools=TOOLS, max_tokens=32
        )
        message = response.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": _serve(episode.payload, call)})
    return None


def _serve(payload: dict[str, Any], call: Any) -> str:
    """Run one tool call; a tool that does not exist is reported to the model, not raised."""
    if call.type != "function" or call.function.name != "count":
        return "error: no such tool"
    return count(payload, call.function.arguments)
