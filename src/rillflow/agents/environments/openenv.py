"""OpenEnv (meta-pytorch/OpenEnv): a client of its servers, and any of our environments as such a server.

The client: over a WebSocket (`/ws`) an episode has its own session as long as the connection lasts; the package's own
client uses this. Over plain HTTP (`/reset`, `/step`) the server decides which calls belong together; ours carry an
`episode_id`. A server that goes away, is late or breaks the protocol is EnvironmentLost: the episode is played again
and not scored.

The server (`rillflow environments --serve NAME`) is closed by default: it listens on loopback, and every route except
`/health` needs its token, as a bearer token or as the first part of the path (`http://host:port/TOKEN`, for clients
that send no headers). Episodes, bodies and idle time are bounded. A WebSocket has its own episode; plain HTTP uses
`episode_id`, by default the empty one.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import aiohttp
import msgspec
from aiohttp import WSMsgType, web

from rillflow.contracts import Environment
from rillflow.errors import EnvironmentLost, RillflowError
from rillflow.types import Observation
from rillflow.wire.server import bearer

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


LARGEST_REQUEST = 1 << 20
EPISODES = 256
IDLE_SECONDS = 600.0
STEP_SECONDS = 120.0
_TEXT = {"type": "string"}
SCHEMA: dict[str, Any] = {
    "action": {"type": "object", "properties": {"action": _TEXT}, "required": ["action"]},
    "observation": {"type": "object", "properties": {"text": _TEXT, "actions": {"type": "array"}}},
    "state": {"type": "object", "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}}},
}


class Refused(Exception):
    """A client's mistake, with the protocol's code for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Played:
    """One episode of the server."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.id = ""
        self.steps = 0
        self.used = time.monotonic()

    async def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        payload = {key: value for key, value in data.items() if key not in ("seed", "episode_id")}
        seed = data.get("seed") or 0
        if not isinstance(seed, int) or seed < 0:
            raise Refused("VALIDATION_ERROR", "seed must be a whole number from 0")
        self.id, self.steps, self.used = str(data.get("episode_id") or ""), 0, time.monotonic()
        return _told(await asyncio.wait_for(self.environment.reset(payload, seed), STEP_SECONDS))

    async def step(self, data: Any) -> dict[str, Any]:
        action = data.get("action") if isinstance(data, Mapping) else None
        if not isinstance(action, str):
            raise Refused("VALIDATION_ERROR", "an action is an object with the text `action`")
        self.steps, self.used = self.steps + 1, time.monotonic()
        return _told(await asyncio.wait_for(self.environment.step(action), STEP_SECONDS))

    def state(self) -> dict[str, Any]:
        return {"episode_id": self.id, "step_count": self.steps}


def _told(seen: Observation) -> dict[str, Any]:
    shown = {"text": seen.text, "actions": seen.actions, "info": msgspec.to_builtins(seen.info)}
    return {"observation": shown, "reward": seen.reward, "done": seen.done}


class OpenEnvServer:
    """A server that makes an environment for each episode with `make`. `start` returns its URL with the token."""

    def __init__(self, name: str, make: Callable[[], Environment], token: str) -> None:
        self._name, self._make, self._token = name, make, token
        self._episodes: dict[str, Played] = {}
        self._sockets = 0
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_get("/health", self._health)
        for prefix in ("", "/{token}"):
            app.router.add_get(f"{prefix}/metadata", self._guarded(self._metadata))
            app.router.add_get(f"{prefix}/schema", self._guarded(self._schema))
            app.router.add_get(f"{prefix}/state", self._guarded(self._state))
            app.router.add_get(f"{prefix}/ws", self._guarded(self._ws))
            app.router.add_post(f"{prefix}/reset", self._guarded(self._reset))
            app.router.add_post(f"{prefix}/step", self._guarded(self._step))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        listens = self._runner.addresses[0]
        return f"http://{listens[0]}:{listens[1]}/{self._token}"

    async def close(self) -> None:
        await self._runner.cleanup()
        for played in self._episodes.values():
            await played.environment.close()
        self._episodes.clear()

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def guard(request: web.Request) -> web.StreamResponse:
            given = request.match_info.get("token") or bearer(request.headers.get("authorization", ""))
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return web.json_response({"detail": "the token is missing or wrong"}, status=401)
            try:
                return await handler(request)
            except Refused as error:
                return web.json_response({"detail": str(error), "code": error.code}, status=422)
            except (RillflowError, TimeoutError) as error:
                return web.json_response({"detail": str(error), "code": "EXECUTION_ERROR"}, status=500)

        return guard

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _metadata(self, _: web.Request) -> web.Response:
        return web.json_response({"name": self._name, "description": f"rillflow environment {self._name}"})

    async def _schema(self, _: web.Request) -> web.Response:
        return web.json_response(SCHEMA)

    async def _reset(self, request: web.Request) -> web.Response:
        data = await _body(request)
        return web.json_response(await (await self._episode(str(data.get("episode_id") or ""))).reset(data))

    async def _step(self, request: web.Request) -> web.Response:
        data = await _body(request)
        return web.json_response(await self._known(str(data.get("episode_id") or "")).step(data.get("action")))

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response(self._known(request.query.get("episode_id", "")).state())

    def _known(self, episode: str) -> Played:
        if episode not in self._episodes:
            raise Refused("SESSION_ERROR", "no such episode: reset first")
        return self._episodes[episode]

    async def _episode(self, episode: str) -> Played:
        if episode not in self._episodes:
            await self._end_idle()
            self._check_room()
            self._episodes[episode] = Played(self._make())
        return self._episodes[episode]

    async def _end_idle(self) -> None:
        old = [key for key, played in self._episodes.items() if time.monotonic() - played.used > IDLE_SECONDS]
        for key in old:
            await self._episodes.pop(key).environment.close()

    def _check_room(self) -> None:
        if len(self._episodes) + self._sockets >= EPISODES:
            raise Refused("CAPACITY_REACHED", f"{EPISODES} episodes are open: come back later")

    async def _ws(self, request: web.Request) -> web.StreamResponse:
        await self._end_idle()
        self._check_room()
        socket = web.WebSocketResponse(max_msg_size=LARGEST_REQUEST, heartbeat=60.0, receive_timeout=IDLE_SECONDS)
        await socket.prepare(request)
        self._sockets += 1
        played = Played(self._make())
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT or (answer := await _answered(played, message.data)) is None:
                    break
                await socket.send_json(answer)
        except TimeoutError:
            pass  # the connection was idle for too long
        finally:
            self._sockets -= 1
            await played.environment.close()
        await socket.close()
        return socket


async def _answered(played: Played, text: str) -> dict[str, Any] | None:
    """Return the answer to a message; None ends the connection."""
    try:
        message = json.loads(text)
        return await _obeyed(played, message if isinstance(message, dict) else {})
    except Refused as error:
        return _failed(error.code, str(error))
    except (ValueError, RecursionError) as error:
        return _failed("INVALID_JSON", f"invalid JSON: {error}")
    except (RillflowError, TimeoutError) as error:
        return _failed("EXECUTION_ERROR", str(error))


async def _obeyed(played: Played, message: dict[str, Any]) -> dict[str, Any] | None:
    kind, data = message.get("type"), message.get("data", {})
    if kind == "close":
        return None
    if kind == "state":
        return {"type": "state", "data": played.state()}
    if kind == "reset" and isinstance(data, dict):
        return {"type": "observation", "data": await played.reset(data)}
    if kind == "step":
        return {"type": "observation", "data": await played.step(data)}
    raise Refused("UNKNOWN_TYPE", f"unknown message type: {kind!r:.80}")


def _failed(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        read = json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refused("INVALID_JSON", "the body is not JSON") from error
    if not isinstance(read, dict):
        raise Refused("VALIDATION_ERROR", "the body is not an object")
    return read
