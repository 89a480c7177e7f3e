"""A client of OpenEnv servers (meta-pytorch/OpenEnv): an environment in another process or on another host.

Over a WebSocket (`/ws`) an episode has its own session as long as the connection lasts; the package's own client uses
this. Over plain HTTP (`/reset`, `/step`) the server decides which calls belong together; ours carry an `episode_id`. A
server that goes away, is late or breaks the protocol is EnvironmentLost: the episode is played again and not scored.
"""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import aiohttp

from rillflow.errors import EnvironmentLost
from rillflow.types import Observation

LARGEST = 16 << 20
_LOST = "look at the server's log; the episode is played again"


class OpenEnv:
    """An environment at the base URL `url`.

    `action` is the field of the action object that holds the text (with None the text must be the object itself);
    `text` is the field of the observation that is shown (with None all of it, as JSON). The payload's `reset` (an
    object) is sent to the server with the seed; without it, the whole payload is.
    """

    def __init__(
        self,
        *,
        url: str,
        transport: Literal["websocket", "http"] = "websocket",
        action: str | None = "action",
        text: str | None = "text",
        token: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {url!r}")
        self._url = url.rstrip("/")
        self._over_http = transport == "http"
        self._action, self._text = action, text
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._episode = ""

    async def reset(self, payload: Mapping[str, Any], seed: int) -> Observation:
        self._episode = uuid.uuid4().hex
        given = payload.get("reset", payload)
        data = {**given, "seed": seed % (1 << 31), "episode_id": self._episode}
        return self._observation(await self._say("reset", data))

    async def step(self, action: str) -> Observation:
        """Take an action. Text that is not a valid action object is answered here, without asking the server."""
        if not self._episode:
            raise EnvironmentLost("the environment was not reset", "call reset before the first step")
        data = {self._action: action} if self._action is not None else _object(action)
        if data is None:
            return Observation("error: the action must be a JSON object", info={"invalid": True})
        return self._observation(await self._say("step", data))

    async def state(self) -> dict[str, Any]:
        """Return the server's state of the episode: its id, its steps, and whatever the server adds."""
        return await self._say("state", {})

    async def close(self) -> None:
        socket, client = self._socket, self._client
        self._socket, self._client = None, None
        if socket is not None:
            with suppress(Exception):
                await socket.send_str('{"type": "close"}')
                await socket.close()
        if client is not None:
            await client.close()

    async def _say(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout):
                answer = await (self._post(kind, data) if self._over_http else self._send(kind, data))
        except TimeoutError as error:
            await self.close()
            raise EnvironmentLost(f"{self._url} did not answer {kind} within {self._timeout:g} s", _LOST) from error
        except (aiohttp.ClientError, OSError, ValueError, TypeError) as error:
            await self.close()
            raise EnvironmentLost(f"{self._url} broke off during {kind}: {error}", _LOST) from error
        if not isinstance(answer, dict):
            raise EnvironmentLost(f"{self._url} answered {kind} with {answer!r:.200}", _LOST)
        return answer

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(headers=self._headers)
        return self._client

    async def _post(self, kind: str, data: dict[str, Any]) -> Any:
        url = f"{self._url}/{kind}"
        if kind == "state":
            called = self._session().get(url, params={"episode_id": self._episode})
        elif kind == "step":
            called = self._session().post(url, json={"action": data, "episode_id": self._episode})
        else:
            called = self._session().post(url, json=data)
        async with called as response:
            body = await _whole(response)
            if response.status != 200:
                raise ValueError(f"status {response.status}: {body[:500].decode(errors='replace')}")
            return json.loads(body)

    async def _send(self, kind: str, data: dict[str, Any]) -> Any:
        if self._socket is None:
            if kind != "reset":
                raise ValueError("the connection has gone")
            self._socket = await self._session().ws_connect(f"{self._url}/ws", max_msg_size=LARGEST)
        await self._socket.send_str(json.dumps({"type": kind} if kind == "state" else {"type": kind, "data": data}))
        answer = json.loads(await self._socket.receive_str())
        if answer.get("type") == "error":
            raise ValueError(str(answer.get("data", {}).get("message", answer))[:500])
        return answer.get("data")

    def _observation(self, answer: Mapping[str, Any]) -> Observation:
        seen, reward = answer.get("observation", {}), answer.get("reward")
        worth = 0.0 if reward is None else reward
        if not isinstance(worth, int | float) or not math.isfinite(worth):
            raise EnvironmentLost(f"{self._url} gave the reward {reward!r:.80}", "a reward is a finite number")
        plain = isinstance(seen, Mapping)
        shown = seen.get(self._text) if plain and self._text is not None else None
        text = shown if isinstance(shown, str) else json.dumps(seen)
        actions = seen.get("actions") if plain else None
        info = seen.get("info") if plain else None
        return Observation(
            text,
            float(worth),
            bool(answer.get("done")),
            [str(action) for action in actions] if isinstance(actions, list) else None,
            dict(info) if isinstance(info, Mapping) else {},
        )


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole body; ValueError if it is larger than LARGEST."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > LARGEST:
            raise ValueError(f"an answer of more than {LARGEST} bytes")
    return bytes(body)


def _object(text: str) -> dict[str, Any] | None:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None
