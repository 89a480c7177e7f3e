"""`web_search`: the open web, through a service that needs a key. The key comes from the environment, never a recipe.

A service that is busy or down is asked again within the call's deadline. If that does not help, the episode fails and
is played again, so that a model does not learn from faults of the network.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal, NamedTuple

import aiohttp
from pydantic import Field

from rillflow.agents.tools.corpus import Passage, listed
from rillflow.agents.tools.functions import tool_of
from rillflow.config.base import Positive, Section
from rillflow.contracts import Tool
from rillflow.errors import ConfigError, EnvironmentLost, ToolError

_ATTEMPTS = 4
_BACKOFF = 0.25  # seconds before the second attempt, doubled for each one after
_MOST = 4 << 20  # bytes of an answer
_SHARE = 0.8  # of the call's time for the service, so that a hanging service is noticed here and not by the toolbox
_REFUSED = (400, 422)  # statuses that concern the query
_UP = "check that the service is up"
_SERVICE = "check that the URL is that of the service"


class _Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    params: dict[str, str]
    body: dict[str, Any] | None


class WebSearch(Section):
    """The tool `web_search`."""

    service: Literal["tavily", "brave"] = Field("tavily", description="whose interface it is")
    url: str | None = Field(None, description="where the service is; default: its own address")
    key_variable: str | None = Field(
        None, description="environment variable with the key; default: TAVILY_API_KEY or BRAVE_API_KEY"
    )
    results: Positive = Field(5, description="how many at most")
    characters: Positive = Field(600, description="that are shown of each")

    async def open(self, timeout: float, stack: AsyncExitStack) -> Tool:
        """Open a client session and return the tool."""
        variable = self.key_variable or _KEYS[self.service]
        key = os.environ.get(variable, "")
        if not key:
            raise ConfigError(f"web_search: {variable} is not set", f"export {variable}=… with a key of {self.service}")
        base = (self.url or _URLS[self.service]).rstrip("/")
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def web_search(query: str) -> str:
            """Search the web."""
            if not query.strip():
                raise ToolError("the query is empty")
            request = _request(self.service, query, key, self.results)
            try:
                async with asyncio.timeout(timeout * _SHARE):
                    found = await _asked(session, base, request)
            except TimeoutError:
                raise EnvironmentLost(
                    f"web_search: {base} does not answer within {timeout * _SHARE:.3g} s", _UP
                ) from None
            return listed(_results(self.service, found)[: self.results], self.characters)

        return tool_of(web_search, timeout=timeout)


_KEYS = {"tavily": "TAVILY_API_KEY", "brave": "BRAVE_API_KEY"}
_URLS = {"tavily": "https://api.tavily.com", "brave": "https://api.search.brave.com"}


def _request(service: str, query: str, key: str, count: int) -> _Request:
    if service == "tavily":
        body = {"query": query, "max_results": count}
        return _Request("POST", "/search", {"Authorization": f"Bearer {key}"}, {}, body)
    params = {"q": query, "count": str(count)}
    return _Request("GET", "/res/v1/web/search", {"X-Subscription-Token": key}, params, None)


def _results(service: str, found: Mapping[str, Any]) -> list[Passage]:
    rows, text = (
        (found.get("results"), "content")
        if service == "tavily"
        else ((found.get("web") or {}).get("results"), "description")
    )
    return [
        Passage(f"{row.get('title', '')} ({row.get('url', '')})", str(row.get(text) or ""), 0.0) for row in rows or ()
    ]


async def _asked(session: aiohttp.ClientSession, base: str, request: _Request) -> Mapping[str, Any]:
    """Return the service's answer. A refused query is an error for the model, a refused key one for the user."""
    wrong = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            await asyncio.sleep(_BACKOFF * 2 ** (attempt - 1))
        try:
            async with session.request(
                request.method, base + request.path, headers=request.headers, params=request.params, json=request.body
            ) as response:
                if response.status in (401, 403):
                    raise EnvironmentLost(f"web_search: {base} refuses the key ({response.status})", "check the key")
                if response.status == 429 or response.status >= 500:
                    wrong = f"status {response.status}"
                    continue
                if response.status in _REFUSED:
                    raise ToolError(f"the search refuses this query (status {response.status})")
                if response.status != 200:
                    raise EnvironmentLost(f"web_search: {base} answers with status {response.status}", _SERVICE)
                return await _json(response, base)
        except aiohttp.ClientError as error:
            wrong = f"{type(error).__name__}: {error}"
    raise EnvironmentLost(f"web_search: {base} does not answer: {wrong:.300}", _UP)


async def _json(response: aiohttp.ClientResponse, base: str) -> Mapping[str, Any]:
    body = bytearray()
    async for block in response.content.iter_any():
        body += block
        if len(body) > _MOST:
            raise EnvironmentLost(f"web_search: {base} answers with more than {_MOST} bytes", _SERVICE)
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EnvironmentLost(f"web_search: {base} does not answer with JSON", _SERVICE)
    return found
