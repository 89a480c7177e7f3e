"""A role: a part in a workflow, played by a policy. What it says is all a workflow needs of a model call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rillflow.types import Said, ToolUse

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

    from rillflow.contracts import Episode

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PolicyRole:
    """`client` says with every call whose it is, so that recipes can compare a role's answers with their like alone."""

    name: str
    policy: str
    client: AsyncOpenAI

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
        """Several independent answers to the same messages. They share a `call`: a reward of it is that of each."""
        if tools:
            settings["tools"] = list(tools)
        if schema is not None:
            shape = {"name": self.name, "schema": dict(schema), "strict": True}
            settings["response_format"] = {"type": "json_schema", "json_schema": shape}
        said: list[Any] = list(messages)
        response: ChatCompletion = await self.client.chat.completions.create(
            model=self.policy, messages=said, n=count, **settings
        )
        return [_said(response, index) for index in range(len(response.choices))]


def _said(response: ChatCompletion, index: int) -> Said:
    choice = response.choices[index]
    message = choice.message
    uses = [
        ToolUse(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
        if call.type == "function"
    ]
    return Said(
        text=message.content or "",
        uses=uses,
        call=response.id,
        cut=choice.finish_reason == "length",
        message=message.model_dump(exclude_none=True),
    )


async def answer_uses(episode: Episode, said: Said) -> list[Message]:
    """What the tools say to the calls of an answer, as messages to append behind it."""
    return [
        {"role": "tool", "tool_call_id": use.id, "content": await episode.tools.call(use.name, use.arguments, episode)}
        for use in said.uses
    ]
