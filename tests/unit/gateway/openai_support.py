"""A running gateway with a real OpenAI client on its session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway_support import CHATML
from openai import AsyncOpenAI
from serving import Served, served

from rillflow.gateway import session_url

USER: Any = {"role": "user", "content": "hello"}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]
HERMES_CALL = '<tool_call>\n{"name": "count", "arguments": {"box": "red"}}\n</tool_call>'
LLAMA_CALL = '{"name": "count", "parameters": {"box": "red"}}'
JSON_CALL = '```json\n[{"name": "count", "arguments": {"box": "red"}}]\n```'
STYLES = {"hermes": HERMES_CALL, "llama3": LLAMA_CALL, "json": JSON_CALL}


class Asking:
    """The gateway and its client."""

    def __init__(self, gateway: Served) -> None:
        self.served = gateway
        self.client = AsyncOpenAI(
            base_url=session_url(gateway.url, "s1"), api_key=gateway.key, max_retries=0, timeout=20
        )

    def script(self, *texts: str, **arguments: Any) -> None:
        self.served.script(*texts, **arguments)

    @property
    def prompts(self) -> list[str]:
        """Return the prompts that the engine got, as text."""
        return [self.served.renderer.decode(request.tokens) for request in self.served.engine.requests]

    async def chat(self, *messages: Any, **arguments: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=list(messages) or [USER], **arguments)

    async def complete(self, prompt: Any, **arguments: Any) -> Any:
        return await self.client.completions.create(model="policy", prompt=prompt, **arguments)

    async def respond(self, input: Any = "hello", **arguments: Any) -> Any:
        return await self.client.responses.create(model="policy", input=input, **arguments)


@asynccontextmanager
async def asking(template: str = CHATML, **arguments: Any) -> AsyncIterator[Asking]:
    async with served(template, **arguments) as gateway:
        made = Asking(gateway)
        try:
            yield made
        finally:
            await made.client.close()
