"""The channel: one WebSocket into vLLM's API server that carries many requests, their tokens, and what controls them.

It is an ASGI middleware (`--middleware`), so that a request costs no HTTP exchange, no JSON and no pydantic.
Invariants: it opens only to who shows the token in RILLFLOW_CHANNEL_TOKEN; every `Ask` is answered by parts of which
exactly the last one has a `finish` or an `error`, unless it is dropped; once `cut` is answered, all parts of all asks
before it were sent; a channel that closes takes its requests with it.

Frames are msgpack: a list of messages, both ways. Both sides read the shapes from this file.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any

import msgspec

PATH = "/rillflow/channel"
TOKEN = "RILLFLOW_CHANNEL_TOKEN"
SHUT = "RILLFLOW_CHANNEL_SHUT"  # if set, a request without the token gets the health only
LOST = "lost"  # the `finish` of an answer when vLLM's engine has died
_GATHER_SECONDS = 0.005  # parts that arrive within so long travel in one frame; a reply takes them along at once
_SHAPES = {"json": "json", "regex": "regex", "lark": "grammar"}  # what vLLM calls the kinds of grammars
_CUT_SECONDS, _CUT_AGAIN_SECONDS = 1.0, 0.01  # for requests to end, and until they are aborted again
_EXPERT_BYTES = 8 << 20  # most recorded experts in one part, and in one frame


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """Sample after `tokens`. The log-probs are of the distribution that is sampled from; with `both` also of the
    model's own, which `rillflow_logprobs` computes in the same step; then parts tell the version of each token, too.

    With an `adapter`, its number in the server, that is added to the weights.

    An answer that is `scored` comes as a whole, in one part, and then has both: it is for a `grammar` (its kind and its
    text), which masks logits before that code sees them.
    """

    id: int
    tokens: list[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop: list[int]
    salt: str
    seed: int | None = None
    grammar: tuple[str, str] | None = None
    scored: bool = False
    both: bool = False
    adapter: int = 0


class Drop(msgspec.Struct, array_like=True, tag="drop"):
    """The caller no longer reads the answer to `id`."""

    id: int


class Control(msgspec.Struct, array_like=True, tag="control"):
    """`cut` (ends the answers of this connection; later ones are sampled), `sleep`, `wake`, `score` (prompts, salt,
    adapter), `add_adapter` (number, folder), `drop_adapter` (number), or a method of all workers (`rillflow_…`) with
    its arguments."""

    id: int
    what: str
    arguments: list[Any] = []


class Part(msgspec.Struct, array_like=True, tag="part"):
    """The next tokens of an answer. `finish` is stop, length or abort; `cached` tells how much of the prompt was.

    Parts without tokens carry the experts that a mixture chose, before the last part of the answer: uint16 numbers of
    the tokens of prompt and answer but the last, with `shape` (layers, experts for each) for every token.
    """

    id: int
    tokens: list[int]
    logprobs: list[float]
    finish: str = ""
    error: str = ""
    cached: int = 0
    raw: list[float] = []
    versions: list[int] = []
    experts: bytes = b""
    shape: tuple[int, int] = (0, 0)


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """The result of a `Control`."""

    id: int
    result: Any = None
    error: str = ""


Asked = list[Ask | Drop | Control]
Answered = list[Part | Reply]


class Channel:
    """The middleware. Requests for other routes pass through it, or are refused if the server is shut. vLLM's own key
    could refuse them, too, but it is part of the key of vLLM's compile cache, and ours differs at every start."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN, "")
        self._shut = bool(os.environ.get(SHUT))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kind = scope["type"]
        if kind == "websocket" and scope["path"] == PATH:
            await receive()
            if not self._shown(scope):
                await send({"type": "websocket.close", "code": 1008})
                return
            await send({"type": "websocket.accept"})
            await _Connection(scope["app"].state.engine_client, send).run(receive)
        elif self._shut and kind in ("http", "websocket") and scope["path"] != "/health" and not self._shown(scope):
            await _refuse(kind, receive, send)
        else:
            await self._app(scope, receive, send)

    def _shown(self, scope: Any) -> bool:
        shown = dict(scope["headers"]).get(b"authorization", b"")
        return bool(self._token) and hmac.compare_digest(shown, f"Bearer {self._token}".encode())


async def _refuse(kind: str, receive: Any, send: Any) -> None:
    if kind == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"the token is missing\n"})


class _Connection:
    """One client. `engine` is vLLM's AsyncLLM."""

    def __init__(self, engine: Any, send: Any) -> None:
        self._engine = engine
        self._send = send
        self._outbox: list[Part | Reply] = []
        self._full = asyncio.Event()
        self._urgent = asyncio.Event()
        self._asks: dict[int, asyncio.Task[None]] = {}
        self._controls: set[asyncio.Task[None]] = set()
        self._params = importlib.import_module("vllm.sampling_params")

    async def run(self, receive: Any) -> None:
        decoder = msgspec.msgpack.Decoder(Asked)
        sender = asyncio.create_task(self._deliver())
        try:
            while (event := await receive())["type"] == "websocket.receive":
                for message in decoder.decode(event["bytes"]):
                    self._take(message)
        finally:
            for task in (sender, *self._asks.values(), *self._controls):
                task.cancel()

    def _take(self, message: Ask | Drop | Control) -> None:
        if isinstance(message, Ask):
            self._asks[message.id] = asyncio.create_task(self._answer(message))
        elif isinstance(message, Drop):
            task = self._asks.pop(message.id, None)
            if task is not None:
                task.cancel()
        else:
            task = asyncio.create_task(self._control(message))
            self._controls.add(task)
            task.add_done_callback(self._controls.discard)

    def _put(self, message: Part | Reply) -> None:
        self._outbox.append(message)
        self._full.set()
        if isinstance(message, Reply):
            self._urgent.set()

    async def _deliver(self) -> None:
        while True:
            await self._full.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_SECONDS):
                    await self._urgent.wait()
            self._full.clear()
            self._urgent.clear()
            messages, self._outbox = self._outbox, []
            for frame in _frames(messages):
                await self._send({"type": "websocket.send", "bytes": msgspec.msgpack.encode(frame)})

    # ------------------------------------------------------------ sampling

    async def _answer(self, ask: Ask) -> None:
        ended = False
        try:
            if ask.scored:
                self._put(await self._whole(ask))
                return
            async for part in self._parts(ask):
                ended = part.finish != ""
                self._put(part)
            if not ended:
                self._put(Part(ask.id, [], [], "abort"))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            finish = LOST if self._engine.errored else ""
            self._put(Part(ask.id, [], [], finish, f"{type(error).__name__}: {error}"))
        finally:
            self._asks.pop(ask.id, None)

    async def _parts(self, ask: Ask) -> AsyncGenerator[Part]:
        prompt = {"type": "token", "prompt_token_ids": ask.tokens, "cache_salt": ask.salt}
        adapter = self._adapter(ask.adapter)
        async for output in self._engine.generate(
            prompt, self._sampling(ask), self._name(ask.id), lora_request=adapter
        ):
            part = output.outputs[0]
            chosen = getattr(part, "routed_experts", None)  # with the last part, if vLLM records them
            if chosen is not None:
                for piece in _experts(ask.id, chosen):
                    yield piece
            tokens = list(part.token_ids)
            logprobs, raw, versions = _logprobs(part.logprobs, len(tokens), both=ask.both) if tokens else ([], [], [])
            cached = output.num_cached_tokens or 0
            yield Part(ask.id, tokens, logprobs, part.finish_reason or "", "", cached, raw, versions)

    async def _whole(self, ask: Ask) -> Part:
        """All of an answer, or an abort: once new weights have cut it nothing can be scored, and vLLM cannot go on with
        a grammar from tokens that it has not sampled now."""
        whole = Part(ask.id, [], [], "abort")
        async for part in self._parts(ask):
            if part.experts:
                self._put(part)
                continue
            whole.tokens += part.tokens
            whole.logprobs += part.logprobs
            whole.cached = max(whole.cached, part.cached)
            whole.finish = part.finish or "abort"
        if whole.finish != "abort":
            name = self._name(ask.id) + "-scored"
            tokens = [*ask.tokens, *whole.tokens]
            whole.raw = await self._scores(tokens, len(whole.tokens), ask.salt, ask.adapter, name)
        return whole if whole.raw else Part(ask.id, [], [], "abort")

    async def _score_all(self, control: int, prompts: list[list[int]], salt: str, adapter: int = 0) -> Any:
        """Return the scores of each prompt's tokens but the first. vLLM computes all of them in one step."""
        asked = [
            self._scores(prompt, len(prompt) - 1, salt, adapter, f"{self._name(control)}-{place}")
            for place, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*asked)

    async def _scores(self, tokens: list[int], last: int, salt: str, adapter: int, name: str) -> list[float]:
        """Return the model's own log-probs of the `last` tokens, as those of a prompt; none if that was cut."""
        prompt = {"type": "token", "prompt_token_ids": tokens, "cache_salt": salt}
        params = self._params.SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._params.RequestOutputKind.FINAL_ONLY,
        )
        async for output in self._engine.generate(prompt, params, name, lora_request=self._adapter(adapter)):
            if output.finished and output.outputs[0].finish_reason == "length" and output.prompt_logprobs:
                rows = list(output.prompt_logprobs)[-last:]
                return [row[token].logprob for row, token in zip(rows, tokens[-last:], strict=True)]
        return []

    def _sampling(self, ask: Ask) -> Any:
        shape = None
        if ask.grammar is not None:
            kind, text = ask.grammar
            shape = self._params.StructuredOutputsParams(**{_SHAPES[kind]: text})
        return self._params.SamplingParams(
            seed=ask.seed,
            structured_outputs=shape,
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            max_tokens=ask.max_tokens,
            stop_token_ids=ask.stop,
            ignore_eos=True,
            logprobs=int(ask.both),
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._params.RequestOutputKind.DELTA,
            skip_clone=True,  # made for this request alone: vLLM need not copy it
        )

    def _name(self, number: int) -> str:
        return f"rillflow-{id(self):x}-{number}"

    def _adapter(self, number: int, folder: str = "") -> Any:
        """Return what a request says of its adapter. The folder matters only when an adapter is added: vLLM looks a
        loaded one up by its number."""
        if not number:
            return None
        request = importlib.import_module("vllm.lora.request").LoRARequest
        return request(f"rillflow-{number}", number, folder or f"/rillflow/adapter/{number}")

    # ------------------------------------------------------------ control

    async def _control(self, message: Control) -> None:
        try:
            result: Any = None
            if message.what == "cut":
                await self._cut(dict(self._asks))
            elif message.what == "sleep":
                result = self._engine.vllm_config.model_config.enable_sleep_mode
                if result:
                    await self._engine.sleep(level=1)
            elif message.what == "wake":
                await self._engine.wake_up()
            elif message.what == "score":
                result = await self._score_all(message.id, *message.arguments)
            elif message.what == "add_adapter":
                result = await self._engine.add_lora(self._adapter(*message.arguments))
            elif message.what == "drop_adapter":
                result = await self._engine.remove_lora(*message.arguments)
            elif message.what.startswith("rillflow_"):
                result = await self._engine.collective_rpc(message.what, args=tuple(message.arguments))
            else:
                raise ValueError(f"there is no {message.what!r}")
            self._put(Reply(message.id, result))
        except Exception as error:
            self._put(Reply(message.id, None, f"{type(error).__name__}: {error}"))

    async def _cut(self, tasks: dict[int, asyncio.Task[None]]) -> None:
        """Cut the answers between two tokens. vLLM hands over what it has, but for the step that it computes: the
        tokens of that one are sampled again. It carries out commands in order, so later ones find none of the requests.
        A request that vLLM does not know yet is aborted again, and cancelled if it does not end: it has sampled
        nothing."""
        end = asyncio.get_running_loop().time() + _CUT_SECONDS
        while (left := {number: task for number, task in tasks.items() if not task.done()}) and (
            asyncio.get_running_loop().time() < end
        ):
            await self._engine.abort([self._name(number) for number in left])
            await asyncio.wait(left.values(), timeout=_CUT_AGAIN_SECONDS)
        for number, task in tasks.items():
            if not task.done():
                task.cancel()
                self._put(Part(number, [], [], "abort"))


def _experts(number: int, chosen_NLK: Any) -> Iterator[Part]:
    """Yield the experts of an answer, in parts of bounded size."""
    _, layers, each = chosen_NLK.shape
    rows = max(1, _EXPERT_BYTES // (2 * layers * each))
    for start in range(0, len(chosen_NLK), rows):
        data = chosen_NLK[start : start + rows].astype("<u2").tobytes()
        yield Part(number, [], [], experts=data, shape=(layers, each))


def _frames(messages: list[Part | Reply]) -> Iterator[list[Part | Reply]]:
    """Yield the messages in order, in frames of bounded size: many answers may end at once."""
    frame: list[Part | Reply] = []
    size = 0
    for message in messages:
        more = len(message.experts) if isinstance(message, Part) else 0
        if frame and size + more > _EXPERT_BYTES:
            yield frame
            frame, size = [], 0
        frame.append(message)
        size += more
    yield frame


def _logprobs(found: Any, tokens: int, *, both: bool) -> tuple[list[float], list[float], list[int]]:
    """Return the log-probs of the drawn tokens, and if `both` were asked for the model's own and the tokens' versions:
    those are in the place of a top token, with an id below 0 (`rillflow_logprobs`)."""
    if not both:
        return found.logprobs[:tokens], [], []
    marks = found.token_ids[1 : 2 * tokens : 2]
    if any(mark >= 0 for mark in marks):
        raise ValueError(
            "vLLM did not compute the model's own log-probs: with speculative decoding only temperatures 0 and 1 "
            "without top_p and top_k are supported, and only engine.on_update refill"
        )
    return found.logprobs[: 2 * tokens : 2], found.logprobs[1 : 2 * tokens : 2], [-1 - mark for mark in marks]
