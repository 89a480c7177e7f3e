"""How vLLM is started (its command line and environment), and our end of the channel into its API server.

Invariant: a call that waits on a channel that closes fails with EngineLost; none waits on a closed one.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import aiohttp
import msgspec

from rillflow.config.policy import EngineConfig
from rillflow.engine.servers.adapters import AdapterPlan
from rillflow.engine.servers.inside.rillflow_channel import (
    PATH,
    SHUT,
    TOKEN,
    Answered,
    Ask,
    Asked,
    Control,
    Drop,
    Part,
    Reply,
)
from rillflow.engine.servers.process import DTYPE_NAMES, INSIDE, has_tokenizer, on_loopback, visible_gpus
from rillflow.engine.servers.weights import ModelFacts
from rillflow.errors import ConfigError, EngineError, EngineLost
from rillflow.weights.models import pick_device
from rillflow.weights.probe import PROMPTS

_OPEN_SECONDS = 30.0
_CLOSE_SECONDS = 1.0
_LARGEST_FRAME = 64 << 20
_FRAME_TOKENS = 1 << 21  # of prompts in one frame, up to 5 bytes each: uvicorn takes 16 MiB

# Tokens of an answer between two of its parts: fewer parts cost vLLM's API server less.
_STREAM_INTERVAL = 16
# A step of a seeded server has fewer tokens than this: from here on vLLM's RMS norm adds up in another order, also with
# its batch invariance (vllm-project/vllm#48271; mended after 0.25).
_INVARIANT_BELOW = 256
# Batch invariance also needs: attention that reads keys from the first to the last however a prompt is cut, no
# prefix cache (a cached prompt is not read as a new one is), and no kernels that a compiler has chosen by timing them,
# which differ from one start to the next.
_SEEDED = ("--attention-backend", "TRITON_ATTN", "--no-enable-prefix-caching", "--enforce-eager")


def command(
    model: ModelFacts,
    settings: EngineConfig,
    port: int,
    *,
    record: bool = False,
    adapters: AdapterPlan | None = None,
) -> list[str]:
    """Return the words that start a server. With `record` it returns the experts that a mixture chooses; with
    `adapters` it can add them to its weights."""
    server = settings.server
    cpu = pick_device(settings.device).type == "cpu"
    invariant = server.seeded and not cpu
    slots = settings.slots * (1 if adapters is None else adapters.policies)
    if settings.on_update == "keep":
        slots += PROMPTS  # a probe is computed beside the answers
    slots = min(slots, _INVARIANT_BELOW - 1) if invariant else slots
    return [
        server.python,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model.folder)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", DTYPE_NAMES[model.dtype]),
        *("--max-model-len", str(settings.context)),
        *("--max-num-seqs", str(slots)),
        *("--tensor-parallel-size", str(server.tensor_parallel)),
        *("--gpu-memory-utilization", str(server.memory)),
        *("--seed", str(secrets.randbits(31))),  # two servers must not draw alike
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--stream-interval", str(_STREAM_INTERVAL)),
        *("--middleware", "rillflow_channel.Channel"),
        *("--worker-extension-cls", "rillflow_weights.RillflowWorker"),
        *("--structured-outputs-config", '{"backend": "guidance"}'),  # what the gateway checks grammars with
        *([] if has_tokenizer(model) else ["--skip-tokenizer-init"]),  # it is for grammars alone
        "--disable-uvicorn-access-log",
        "--disable-log-stats",  # its metrics cost as much as our part of a request
        *(["--enforce-eager"] if cpu else []),
        *(["--moe-backend", "triton"] if model.router_layers and not cpu else []),  # others store weights reordered
        *(["--enable-return-routed-experts"] if record else []),
        *([*_SEEDED, "--max-num-batched-tokens", str(_INVARIANT_BELOW - 1)] if invariant else []),
        *(adapters.arguments(cpu=cpu) if adapters is not None else []),
        *server.arguments,
    ]


def environment(settings: EngineConfig, token: str) -> dict[str, str]:
    """Return the environment of a server whose other routes are shut."""
    device = pick_device(settings.device)
    chosen = {name: value for name, value in os.environ.items() if not name.startswith("RILLFLOW_")}
    chosen |= {
        "PYTHONPATH": str(INSIDE),
        "RILLFLOW_INSIDE": "vllm",
        TOKEN: token,
        SHUT: "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }
    if device.type == "cpu":
        chosen |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    elif settings.server.seeded:
        chosen["VLLM_BATCH_INVARIANT"] = "1"
    return chosen | visible_gpus(device, settings.server.tensor_parallel) | settings.server.environment


def running_server(settings: EngineConfig) -> tuple[str, str]:
    """URL and token of a server that runs already."""
    url = on_loopback(settings.server.url or "")
    token = settings.server.environment.get(TOKEN) or os.environ.get(TOKEN, "")
    if not token:
        raise ConfigError(
            f"engine.server.url needs the token of the server's channel, in the environment as {TOKEN}",
            "start the server with the same variable: see the page on engines",
        )
    return url, token


# ------------------------------------------------------------ the channel


class Answer:
    """The parts of one ask as they arrive."""

    def __init__(self) -> None:
        self._parts: deque[Part] = deque()
        self._arrived = asyncio.Event()
        self._lost = ""

    def put(self, part: Part) -> None:
        self._parts.append(part)
        self._arrived.set()

    def lose(self, reason: str) -> None:
        self._lost = reason
        self._arrived.set()

    async def next(self) -> Part:
        while not self._parts:
            if self._lost:
                raise EngineLost(self._lost, "the request can go on elsewhere")
            self._arrived.clear()
            await self._arrived.wait()
        return self._parts.popleft()


class ChannelClient:
    """Many requests and calls over one WebSocket."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token
        self._numbers = count()
        self._answers: dict[int, Answer] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._outbox: Asked = []
        self._full = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        self._session = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                self._socket = socket = await self._session.ws_connect(
                    self._url.rstrip("/") + PATH,
                    headers={"authorization": f"Bearer {self._token}"},
                    compress=0,
                    max_msg_size=_LARGEST_FRAME,
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self._session.close()
            raise EngineLost(
                f"vLLM at {self._url} opens no channel: {error!r}",
                "it must run with --middleware rillflow_channel.Channel, and with the same RILLFLOW_CHANNEL_TOKEN",
            ) from error
        self._tasks = [
            asyncio.create_task(self._read(socket), name="channel-read"),
            asyncio.create_task(self._write(socket), name="channel-write"),
        ]

    async def close(self) -> None:
        self._lose("the channel was closed")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._socket is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._socket.close()
        if self._session is not None:
            await self._session.close()

    def ask(self, **settings: Any) -> tuple[int, Answer]:
        number, answer = next(self._numbers), Answer()
        if self.closed.done():
            answer.lose(self.closed.result())
        self._answers[number] = answer
        self._put(Ask(id=number, **settings))
        return number, answer

    def drop(self, number: int) -> None:
        """Stop reading an answer, ended or not."""
        if self._answers.pop(number, None) is not None:
            self._put(Drop(number))

    def ended(self, number: int) -> None:
        self._answers.pop(number, None)

    async def call(self, what: str, *arguments: Any, deadline: float) -> Any:
        """EngineLost when the channel closes or the deadline passes, EngineError when it was refused."""
        if self.closed.done():
            raise EngineLost(self.closed.result(), "it is started again: try later")
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._put(Control(number, what, list(arguments)))
        try:
            async with asyncio.timeout(deadline):
                return await reply
        except TimeoutError:
            raise EngineLost(f"vLLM did not answer {what} in {deadline:g} s", "see its log") from None
        finally:
            self._replies.pop(number, None)

    # ------------------------------------------------------------ frames

    def _put(self, message: Ask | Drop | Control) -> None:
        self._outbox.append(message)
        self._full.set()

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            while True:
                await self._full.wait()
                self._full.clear()
                messages, self._outbox = self._outbox, []
                for frame in _frames(messages):
                    await socket.send_bytes(msgspec.msgpack.encode(frame))
        except Exception as error:  # whatever it is: nothing is sent any more
            self._lose(f"vLLM's channel broke: {error!r}")

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        decoder = msgspec.msgpack.Decoder(Answered)
        reason = "vLLM closed the channel"
        try:
            async for frame in socket:
                if frame.type is not aiohttp.WSMsgType.BINARY:
                    break
                for message in decoder.decode(frame.data):
                    self._take(message)
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            reason = f"vLLM's channel broke: {error!r}"
        finally:
            self._lose(reason)

    def _take(self, message: Part | Reply) -> None:
        if isinstance(message, Part):
            answer = self._answers.get(message.id)
            if answer is not None:
                answer.put(message)
            return
        reply = self._replies.get(message.id)
        if reply is None or reply.done():
            return
        if message.error:
            reply.set_exception(EngineError(f"vLLM: {message.error}", "see its log"))
        else:
            reply.set_result(message.result)

    def _lose(self, reason: str) -> None:
        if self.closed.done():
            return
        self.closed.set_result(reason)
        for answer in self._answers.values():
            answer.lose(reason)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineLost(reason, "it is started again: try later"))
            with suppress(asyncio.CancelledError):
                reply.exception()


def _frames(messages: Asked) -> Iterator[Asked]:
    """In order, in frames that are not too large: after a cut all answers are asked for at once."""
    frame: Asked = []
    tokens = 0
    for message in messages:
        size = len(message.tokens) if isinstance(message, Ask) else 0
        if frame and tokens + size > _FRAME_TOKENS:
            yield frame
            frame, tokens = [], 0
        frame.append(message)
        tokens += size
    yield frame
