"""A role: a part in a workflow, played by a policy. What it says is all a workflow needs of a model call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rillflow.errors import RillflowError
from rillflow.types import Said, ToolUse

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

    from rillflow.contracts import Episode

Message = dict[str, Any]
Chat = Callable[[bytes, str], Awaitable[bytes]]
# What is for a client alone, and not for whom it asks.
_OF_CLIENTS = {"extra_headers", "extra_query", "extra_body", "timeout", "stream"}


class PolicyRole:
    """Every call says whose it is, so that recipes can compare a role's answers with their like alone.

    Where the gateway is in this process, `chat` asks it without HTTP; the client is made when it is needed.
    """

    def __init__(self, name: str, policy: str, client: Callable[[], AsyncOpenAI], chat: Chat | None = None) -> None:
        self.name, self.policy = name, policy
        self._client, self._chat = client, chat

    @property
    def client(self) -> AsyncOpenAI:
        return self._client()

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Said:
        """One answer. With a JSON `schema` it can only be of that shape; `settings` are those of the OpenAI client."""
        (said,) = await self.ask_many(messages, 1, tools=tools, schema=schema, **settings)
        return said

    async def ask_many(
        self,
        messages: Sequence[Message],
        count: int,
        *,
        tools: Sequence[Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> list[Said]:
        """Several independent answers to the same messages. Each has a `call` of its own, for its reward."""
        if tools:
            settings["tools"] = list(tools)
        if schema is not None:
            shape = {"name": self.name, "schema": dict(schema), "strict": True}
            settings["response_format"] = {"type": "json_schema", "json_schema": shape}
        asked: dict[str, Any] = {"model": self.policy, "messages": list(messages), "n": count, **settings}
        if (said := await self._asked_directly(asked)) is not None:
            return said
        response: ChatCompletion = await self.client.chat.completions.create(**asked)
        return _all_said(response.model_dump())

    async def _asked_directly(self, asked: dict[str, Any]) -> list[Said] | None:
        """None where only a client can ask; and where it was refused: a client that asks for it once more is told why
        by an error of its own kind, which agents know."""
        if self._chat is None or _OF_CLIENTS & asked.keys():
            return None
        try:
            body = msgspec.json.encode(asked)
        except TypeError:  # something of the client's own
            return None
        try:
            return _all_said(msgspec.json.decode(await self._chat(body, self.name)))
        except RillflowError:
            return None


def _all_said(response: dict[str, Any]) -> list[Said]:
    call, choices = response["id"], response["choices"]
    return [_said(f"{call}_{one['index']}" if len(choices) > 1 else call, one) for one in choices]


def _said(call: str, choice: dict[str, Any]) -> Said:
    message = _given(choice["message"])
    uses = [
        ToolUse(use["id"], use["function"]["name"], use["function"]["arguments"])
        for use in message.get("tool_calls", ())
        if use["type"] == "function"
    ]
    return Said(
        text=message.get("content", ""),
        uses=uses,
        call=call,
        cut=choice["finish_reason"] == "length",
        message=message,
    )


def _given(value: Any) -> Any:
    """Without what is None."""
    if isinstance(value, dict):
        return {key: _given(one) for key, one in value.items() if one is not None}
    return [_given(one) for one in value] if isinstance(value, list) else value


async def answer_uses(episode: Episode, said: Said) -> list[Message]:
    """What the tools say to the calls of an answer, as messages to append behind it."""
    return [
        {"role": "tool", "tool_call_id": use.id, "content": await episode.tools.call(use.name, use.arguments, episode)}
        for use in said.uses
    ]
