"""SGLang behind the Engine contract.

Invariants: the prefix cache never crosses versions, because every version has a key of its own in it, and it is emptied
after every update; what SGLang holds after an update is read back and compared with the fingerprints of what was
published, so weights that arrived wrong are noticed before a token is sampled from them.

Running requests are ended with `abort_request`, not with `pause_generation`, which looks whether all have ended only
once a second. Seeds are not passed on: SGLang uses them only in a slower mode. Its log-probs are those of the
distribution at the requested temperature, before its `top_p` and `top_k`; so our code inside it (`Cuts`) applies these
two, and `logprobs` are those of the distribution that was drawn from. `inside.rillflow_logprobs` adds the model's own
where they differ. With a grammar the whole answer is scored as a prompt instead: it is delivered when it is complete,
and an answer that new weights cut is sampled again from its beginning.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from rillflow.config.policy import EngineConfig
from rillflow.contracts import Clock
from rillflow.engine.servers import sglang_server as server
from rillflow.engine.servers.calls import Part, is_scored, needs_both
from rillflow.engine.servers.in_place import InPlaceEngine
from rillflow.engine.servers.inside.rillflow_sglang import answer_name, write_order
from rillflow.engine.servers.process import ServerProcess, free_port
from rillflow.engine.servers.sglang_server import Chunk, Outcome, generate_body, loader_body, probe_body, score_body
from rillflow.engine.servers.weights import ModelFacts
from rillflow.errors import EngineError, EngineLost
from rillflow.types import FinishReason, GenerateRequest, Sampling
from rillflow.types.base import json_decoder
from rillflow.weights.models import DTYPES

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_WATCH_SECONDS = 2.0  # between two looks at a server that was not started here
_MISSES = 5  # looks in a row that fail before it counts as lost
_CONTROL_SECONDS = 60.0
_WEIGHTS_SECONDS = 600.0  # for all weights of a large model to be copied and read back
_STALL_SECONDS = 600.0  # without a token of an answer: SGLang's own queue is part of it
_ABORT_AGAIN_SECONDS = 0.05
_IDLE_SECONDS = 10.0  # for the last aborted requests to leave before the cache is emptied
_LONGEST_LINE = 1 << 22
_FINISHES: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SglangEngine(InPlaceEngine):
    """Starts and supervises an SGLang server, or uses one that runs."""

    PRODUCT = "SGLang"

    def __init__(
        self, model: ModelFacts, settings: EngineConfig, *, logs: Path | None = None, clock: Clock | None = None
    ) -> None:
        super().__init__(model, settings, logs=logs, clock=clock)
        self._url = ""
        self._http: aiohttp.ClientSession | None = None
        self._orders = Path()
        self._numbers = count()
        self._running = 0
        self._aborting: asyncio.Task[None] | None = None
        self._events = msgspec.json.Decoder(Chunk)

    # ------------------------------------------------------------ the server

    async def bring_up(self) -> None:
        log.warning("SGLang is experimental: Rillflow is tested with its CPU build, not on GPUs")
        if self.settings.server.url is None:
            key = await self._start()
        else:
            self._url, key, self._orders = server.running_server(self.settings)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"authorization": f"Bearer {key}"} if key else {},
            read_bufsize=_LONGEST_LINE,
        )
        await self.wait_until(self._answers)
        self.learn_layout(await self._order("rillflow_layout"))
        if self.settings.server.url is not None:  # whatever it served before
            await self.put_initial()

    async def _start(self) -> str:
        port, key = free_port(), secrets.token_hex(32)  # one that begins with a dash would be taken for an option
        self._orders = Path(tempfile.mkdtemp(prefix="rillflow-sglang-"))
        secret = self._orders / "secret.yaml"
        secret.write_text(f"api-key: {key}\n")
        process = ServerProcess(
            server.command(self.model, self.settings, port, secret),
            environment=server.environment(self.settings, self._orders),
            log=(self._logs or self._orders) / f"sglang-{port}.log",
        )
        self._url = f"http://127.0.0.1:{port}"
        await self.launch(process)
        return key

    async def _answers(self) -> bool:
        with suppress(EngineError):
            await self._call("GET", "/model_info", None, deadline=5.0)
            return True
        return False

    async def lost(self) -> str:
        if self.process is not None:
            return f"its process ended with {await self.process.wait()}"
        missed = 0
        while missed < _MISSES:
            await asyncio.sleep(_WATCH_SECONDS)
            missed = 0 if await self._answers() else missed + 1
        return f"it has not answered {_MISSES} times"

    async def tear_down(self) -> None:
        await self._stop_aborting()
        if self._http is not None:
            await self._http.close()
        if self.process is not None:
            await self.process.stop()
            if self._logs is not None:  # else the log is in there
                shutil.rmtree(self._orders, ignore_errors=True)

    # ------------------------------------------------------------ sampling

    async def sample(self, request: GenerateRequest, version: int) -> AsyncGenerator[Part]:
        async with aclosing(self._parts(request, version)) as parts:
            if is_scored(request.sampling):
                yield await self._whole(request, version, parts)
                return
            async for part in parts:
                yield part

    async def _whole(self, request: GenerateRequest, version: int, parts: AsyncGenerator[Part]) -> Part:
        """All of an answer, or an abort: SGLang cannot go on with a grammar from tokens that it has not sampled now. It
        masks logits before it takes any log-prob, so those without a grammar are taken from a prompt."""
        tokens: list[int] = []
        logprobs: list[float] = []
        finish: FinishReason | None = "abort"
        async for part in parts:
            tokens += part.tokens
            logprobs += part.logprobs
            finish = part.finish
        if finish == "abort" or not tokens:
            return Part([], [], [], "abort")
        raw = await self._scores(request.tokens, tokens, version)
        return Part(tokens, logprobs, raw, finish) if raw else Part([], [], [], "abort")

    async def _scores(self, tokens: list[int], answer: list[int], version: int) -> list[float]:
        """Return the scores of an answer's tokens; none if the request was cut."""
        self._running += 1
        try:
            body = score_body(tokens, answer, self.salt(version))
            scored = await self._call("POST", "/generate", Chunk, body, deadline=_STALL_SECONDS)
        finally:
            self._running -= 1
        reason = scored.meta_info.finish_reason
        return [] if reason is None or reason.type == "abort" else _scored(scored, answer)

    async def scores(self, prompts: Sequence[Sequence[int]], version: int) -> list[list[float]]:
        body = probe_body(prompts, self.probe_salt(version))
        found = await self._call("POST", "/generate", list[Chunk], body, deadline=_STALL_SECONDS)
        return [_scored(one, list(prompt[1:])) for one, prompt in zip(found, prompts, strict=True)]

    async def _parts(self, request: GenerateRequest, version: int) -> AsyncGenerator[Part]:
        body = generate_body(request, self.settings.context, self.salt(version))
        self._running += 1
        try:
            async with self._session.post(
                f"{self._url}/generate",
                data=body,
                headers={"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(sock_connect=_CONTROL_SECONDS, sock_read=_STALL_SECONDS),
            ) as response:
                await _refused(response, "/generate")
                first = True
                async for line in response.content:
                    chunk = self._read(line)
                    if chunk is None:
                        continue
                    if first and chunk.output_ids:
                        first = False
                        self.reused += chunk.meta_info.cached_tokens
                        self.prefilled += len(request.tokens) - chunk.meta_info.cached_tokens
                    part = _part(chunk, request.sampling)
                    yield part
                    if part.finish is not None:
                        return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineLost(f"SGLang's answer broke off: {error!r}", "the request can go on elsewhere") from error
        finally:
            self._running -= 1

    def _read(self, line: bytes) -> Chunk | None:
        if not line.startswith(b"data: {"):
            return None
        try:
            chunk = self._events.decode(line[6:])
        except msgspec.MsgspecError as error:
            raise EngineError(f"SGLang sent what is no part of an answer: {error}", "is it a tried release?") from error
        if chunk.error is not None:
            raise EngineError(f"SGLang: {chunk.error.message}", "see its log")
        return chunk

    async def cut(self) -> None:
        await self._abort_all()
        await self._stop_aborting()
        self._aborting = asyncio.create_task(self._abort_rest(), name="sglang-abort")

    async def _abort_all(self) -> None:
        await self._call("POST", "/abort_request", None, {"rid": "", "abort_all": True}, deadline=_CONTROL_SECONDS)

    async def _abort_rest(self) -> None:
        """A request that was still on its way to the server has not been hit: abort until all have ended."""
        while self._running:
            await asyncio.sleep(_ABORT_AGAIN_SECONDS)
            await self._abort_all()

    async def _stop_aborting(self) -> None:
        if self._aborting is not None:
            self._aborting.cancel()
            await asyncio.wait([self._aborting])
            self._aborting = None

    async def go_on(self) -> None:
        await self._stop_aborting()

    # ------------------------------------------------------------ weights

    async def rewrite(self, method: str, argument: list[Any]) -> list[Any]:
        answers = await self._order(method, argument)
        flush = f"/flush_cache?timeout={_IDLE_SECONDS:g}"
        await self._call("POST", flush, None, {}, deadline=_IDLE_SECONDS + _CONTROL_SECONDS)
        return answers

    async def _order(self, method: str, *arguments: Any) -> list[Any]:
        """Have every rank carry out a method of `rillflow_weights`; what each of them gives."""
        number, ranks = next(self._numbers), self.settings.server.tensor_parallel
        shapes = {name: list(shape) for name, shape in self.model.shapes.items()}
        layout = [shapes, str(DTYPES[self.model.dtype]).removeprefix("torch."), dict(self.model.pieces)]
        await asyncio.to_thread(write_order, self._orders, number, layout, method, list(arguments))
        await self._control("/begin_weight_update", {"selector": "target"})
        try:
            await self._control("/update_weights_from_tensor", loader_body(server.LOADER, ranks))
        finally:
            await self._control("/end_weight_update", {})
        return [self._answer(number, rank) for rank in range(ranks)]

    def _answer(self, number: int, rank: int) -> Any:
        path = self._orders / answer_name(number, rank)
        try:
            answer = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            raise EngineError(f"rank {rank} of SGLang left no answer: {error}", "see its log") from error
        path.unlink()
        if "error" in answer:
            raise EngineError(f"rank {rank} of SGLang: {answer['error']}", "see its log")
        return answer["result"]

    async def _control(self, route: str, body: dict[str, Any]) -> None:
        outcome = await self._call("POST", route, Outcome, body, deadline=_WEIGHTS_SECONDS)
        if not outcome.success:
            raise EngineError(f"SGLang refused {route}: {outcome.message}", "see its log")

    # ------------------------------------------------------------ HTTP

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._http is None or self._http.closed:
            raise EngineLost("SGLang was not started", "start the engine")
        return self._http

    async def _call(self, method: str, route: str, shape: type[_T] | None, body: Any = None, *, deadline: float) -> _T:
        """EngineLost when it cannot be reached or does not answer in time, EngineError when it refuses."""
        try:
            async with self._session.request(
                method, self._url + route, json=body, timeout=aiohttp.ClientTimeout(total=deadline)
            ) as response:
                data = await response.read()
                if response.status != 200 and shape is not Outcome:
                    await _refused(response, route)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineLost(f"SGLang did not answer {route}: {error!r}", "it is started again: try later") from error
        if shape is None:
            return None  # type: ignore[return-value]
        try:
            return json_decoder(shape).decode(data)
        except msgspec.MsgspecError as error:
            raise EngineError(f"SGLang answered {route} with {data[:200]!r}", "is it a tried release?") from error


def _scored(chunk: Chunk, tokens: list[int]) -> list[float]:
    """The log-probs of a prompt's last tokens."""
    last = chunk.meta_info.input_token_logprobs[-len(tokens) :]
    raw = [value for value, _, _ in last if value is not None]
    if [token for _, token, _ in last] != tokens or len(raw) != len(tokens):
        raise EngineError("SGLang did not score the tokens that it was given", "is it a tried release?")
    return raw


def _part(chunk: Chunk, asked: Sampling) -> Part:
    """Return a chunk as a part. An answer that ended without one of its stop tokens was cut: it goes on."""
    tokens, logprobs = chunk.output_ids, [value for value, _, _ in chunk.meta_info.output_token_logprobs]
    if len(tokens) != len(logprobs):
        raise EngineError(
            f"SGLang sent {len(tokens)} tokens with {len(logprobs)} log-probs",
            "it must run with --incremental-streaming-output",
        )
    reason = chunk.meta_info.finish_reason
    finish = None if reason is None else _FINISHES.get(reason.type)
    if reason is not None and finish is None:
        raise EngineError(f"SGLang ended an answer with {reason.type}: {reason.message}", "see its log")
    if finish == "stop" and (not tokens or tokens[-1] not in asked.stop_tokens):
        finish = "abort"
    drawn = [0.0] * len(tokens) if asked.temperature == 0.0 else logprobs
    raw = _raw(chunk) if needs_both(asked) else logprobs
    return Part(tokens, drawn, raw, finish)


def _raw(chunk: Chunk) -> list[float]:
    """Return the model's own log-probs: they are in the place of a top token, with an id below 0."""
    found = [top for tops in chunk.meta_info.output_top_logprobs for top in tops or ()]
    if len(found) != len(chunk.output_ids) or any(token >= 0 for _, token, _ in found):
        raise EngineError(
            "SGLang did not compute the model's own log-probs",
            "with speculative decoding only temperatures 0 and 1 without top_p and top_k are supported",
        )
    return [value for value, _, _ in found]


async def _refused(response: aiohttp.ClientResponse, route: str) -> None:
    if response.status == 200:
        return
    said = (await response.read())[:500].decode(errors="replace")
    if response.status in {502, 503, 504}:
        raise EngineLost(f"SGLang cannot serve {route}: {said}", "the request can go on elsewhere")
    raise EngineError(f"SGLang refused {route} with {response.status}: {said}", "see its log")
