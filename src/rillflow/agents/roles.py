"""Roles: a role is a part in a workflow that a policy plays. Its answers hold what a workflow needs of a model call."""

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
# Settings that only a client can handle.
_OF_CLIENTS = {"extra_headers", "extra_query", "extra_body", "timeout", "stream"}


class PolicyRole:
    """A role whose calls carry its name, so that recipes can compare answers of one role with each other.

    If the gateway is in this process, `chat` calls it without HTTP. The client is made on first use.
    """

    def __init__(self, name: str, policy: str, client: Callable[[], AsyncOpenAI], chat: Chat | None = None) -> None:
        self.name, self.policy = name, policy
        self._client, self._chat = client, chat

    @property
    def client(self) -> AsyncOpenAI:
        """An OpenAI client whose calls are the role's."""
        return self._client()

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Said:
        """Return one answer. A JSON `schema` constrains its format; `settings` are those of the OpenAI client."""
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
        """Return `count` independent answers to the same messages. Each has its own `call`, for its reward."""
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
        """Return the answers without HTTP; None if only a client can ask, or if the gateway refused the call.

        A client then repeats a refused call and raises an exception of its own, which agents know.
        """
        if self._chat is None or _OF_CLIENTS & asked.keys():
            return None
        try:
            body = msgspec.json.encode(asked)
        except TypeError:  # a value that only the client can encode
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
    """Return a value without the keys that are None."""
    if isinstance(value, dict):
        return {key: _given(one) for key, one in value.items() if one is not None}
    return [_given(one) for one in value] if isinstance(value, list) else value


async def answer_uses(episode: Episode, said: Said) -> list[Message]:
    """Call the tools that an answer uses and return their results as messages to append."""
    return [
        {"role": "tool", "tool_call_id": use.id, "content": await episode.tools.call(use.name, use.arguments, episode)}
        for use in said.uses
    ]
