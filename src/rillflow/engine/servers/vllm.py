"""vLLM behind the Engine contract.

Invariants: the prefix cache never crosses versions or starts of an engine, because both are part of its key. Weights in
vLLM are read back after an update and compared with the published fingerprints, so wrong weights are noticed before a
token is sampled from them.

Seeds are passed on only with `engine.server.seeded`: vLLM's seeds are expensive on GPUs and give another draw after a
cut. vLLM returns the log-probs of the distribution that it drew from; `inside.rillflow_logprobs` adds the model's own
where they differ. With a grammar the whole answer is scored as a prompt instead: it is delivered when it is complete,
and an answer that new weights cut is sampled again from its beginning.

Every request names the adapter of its version, if that is one (`adding`).

With `engine.on_update: keep` weights change under running answers, between two of vLLM's steps. The worker that writes
them tells its sampler the version, which travels with each token.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from rillflow.config.policy import EngineConfig
from rillflow.contracts import Clock
from rillflow.engine.experts import pack
from rillflow.engine.servers import vllm_server as server
from rillflow.engine.servers.adapters import AdapterPlan
from rillflow.engine.servers.adding import AddingEngine
from rillflow.engine.servers.calls import Part, is_scored, needs_both
from rillflow.engine.servers.inside import rillflow_channel
from rillflow.engine.servers.inside.rillflow_channel import LOST
from rillflow.engine.servers.process import ServerProcess, free_port
from rillflow.engine.servers.vllm_server import ChannelClient
from rillflow.engine.servers.weights import ModelFacts
from rillflow.errors import ConfigError, ContextOverflow, EngineError, EngineLost
from rillflow.types import FinishReason, GenerateRequest
from rillflow.weights.models import DTYPES

_CONTROL_SECONDS = 60.0
_WEIGHTS_SECONDS = 600.0  # for all weights of a large model to be copied and read back
_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of an answer's parts
_STALL_SECONDS = 600.0  # without a token of an answer: vLLM's own queue is part of it
_FINISHES: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VllmEngine(AddingEngine):
    """Starts and supervises a vLLM server, alone or with the engines of other policies, or uses one that runs."""

    PRODUCT = "vLLM"
    DECODES_AHEAD = True

    def __init__(
        self,
        model: ModelFacts,
        settings: EngineConfig,
        *,
        logs: Path | None = None,
        clock: Clock | None = None,
        record: bool = False,
        adapters: AdapterPlan | None = None,
    ) -> None:
        """With `record`, answers come with the experts that a mixture chose for each token; with `adapters`, versions
        that are adapters are not merged."""
        super().__init__(model, settings, logs=logs, clock=clock, adapters=adapters)
        self._record = record
        self._channel: ChannelClient | None = None

    # ------------------------------------------------------------ the server

    async def bring_up(self) -> None:
        url, token = await self._reach()
        self.begin_with_base()
        self._channel = ChannelClient(url, token)
        await self._channel.open()
        await self._learn_layout()
        await self._call("rillflow_return_raw_logprobs", deadline=_CONTROL_SECONDS)
        await self._try()
        if self.settings.server.url is not None:  # whatever it served before
            await self.announce(0)
            await self.put_initial()
            self.begin_with_base()

    async def _reach(self) -> tuple[str, str]:
        """Start a server, or find the one that runs; return its URL and token once it is healthy."""
        if self.settings.server.url is not None:
            url, token = server.running_server(self.settings)
            await self._wait_healthy(url)
            return url, token
        return await (self.start_server() if self.shared is None else self.shared.join(self))

    async def start_server(self) -> tuple[str, str]:
        """Start a server, without adapters if it ends because of them."""
        url, token = await self._start()
        try:
            await self._wait_healthy(url)
        except EngineLost:
            cause = self.process.cause() if self.process is not None else ""
            if self.plan is None or "lora" not in cause.lower():
                raise
            self.refuse_adapters(f"vLLM cannot serve this model with adapters: {cause}")
            await self.tear_down()
            return await self.start_server()
        return url, token

    async def _start(self) -> tuple[str, str]:
        port, token = free_port(), secrets.token_urlsafe(32)
        logs = self._logs or Path(tempfile.mkdtemp(prefix="rillflow-vllm-"))
        process = ServerProcess(
            server.command(self.model, self.settings, port, record=self._record, adapters=self.plan),
            environment=server.environment(self.settings, token),
            log=logs / f"vllm-{port}.log",
        )
        await self.launch(process)
        return f"http://127.0.0.1:{port}", token

    async def _wait_healthy(self, url: str) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            await self.wait_until(lambda: _healthy(session, url))

    async def _learn_layout(self) -> None:
        shapes = {name: list(shape) for name, shape in self.model.shapes.items()}
        dtype = str(DTYPES[self.model.dtype]).removeprefix("torch.")
        try:
            layout = await self._call("rillflow_layout", shapes, dtype, self.model.pieces, deadline=_CONTROL_SECONDS)
        except EngineLost:
            raise
        except EngineError as error:
            raise ConfigError(
                f"its loader cannot be followed: {error.message}", "this model cannot be trained with vLLM"
            ) from error
        self.learn_layout(layout)
        self.check_room([answer["adapters"] for answer in layout])

    async def _try(self) -> None:
        """Let the server read two tokens: some models load, and end it when it computes with them."""
        try:
            await self.scores([[0, 0]], self.version)
        except EngineError as error:
            cause = self.process.cause() if self.process is not None else ""
            raise EngineLost(f"vLLM cannot compute with this model: {cause or error.message}", "see its log") from error

    async def lost(self) -> str:
        assert self._channel is not None
        reason = await asyncio.shield(self._channel.closed)
        if self.process is not None and not self.process.running:
            return f"its process has ended: {reason}"
        return reason

    async def tear_down(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        if self.shared is not None:
            await self.shared.leave(self, closing=self._closed)
        elif self.process is not None:
            await self.process.stop()

    async def _call(self, what: str, *arguments: Any, deadline: float) -> Any:
        if self._channel is None:
            raise EngineLost("vLLM was not started", "start the engine")
        return await self._channel.call(what, *arguments, deadline=deadline)

    # ------------------------------------------------------------ sampling

    async def sample(self, request: GenerateRequest, version: int) -> AsyncGenerator[Part]:
        asked, room = request.sampling, self._room(request)
        if self._channel is None:
            raise EngineLost("vLLM was not started", "start the engine")
        channel = self._channel
        number, answer = channel.ask(
            tokens=request.tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k if asked.top_k < self.model.vocabulary else 0,
            max_tokens=min(asked.max_tokens, room),
            stop=[token for token in asked.stop_tokens if 0 <= token < self.model.vocabulary],
            salt=self.salt(version),
            seed=_seed(request) if self.settings.server.seeded else None,
            grammar=None if asked.grammar is None else (asked.grammar.kind, asked.grammar.text),
            scored=is_scored(asked),
            both=needs_both(asked) or self.keeps,
            adapter=self.adapter,
        )
        first, chosen = True, _Chosen()
        try:
            while True:
                async with asyncio.timeout(_STALL_SECONDS):
                    part = await answer.next()
                if part.finish == LOST:
                    raise EngineLost(f"vLLM: {part.error}", "the request can go on elsewhere")
                if part.error or part.finish not in ("", *_FINISHES):
                    channel.ended(number)
                    raise EngineError(f"vLLM: {part.error or part.finish}", "see its log")
                chosen.add(part)
                if part.experts:
                    continue
                if first and part.tokens:
                    first = False
                    self.reused += part.cached
                    self.prefilled += len(request.tokens) - part.cached
                greedy = asked.temperature == 0.0
                drawn = [0.0] * len(part.tokens) if greedy else part.logprobs
                finish = _FINISHES.get(part.finish)
                if finish is not None:
                    channel.ended(number)
                raw = part.raw if is_scored(asked) or needs_both(asked) else part.logprobs
                recorded = self._record and finish in ("stop", "length")
                experts = chosen.packed(self.model.router_layers, len(request.tokens)) if recorded else b""
                yield Part(part.tokens, drawn, raw, finish, experts, part.versions if self.keeps else [])
                if finish is not None:
                    return
        finally:
            channel.drop(number)

    async def scores(self, prompts: Sequence[Sequence[int]], version: int) -> list[list[float]]:
        scored: list[list[float]] = await self._call(
            "score", prompts, self.probe_salt(version), self.adapter, deadline=_WEIGHTS_SECONDS
        )
        return scored

    def _room(self, request: GenerateRequest) -> int:
        """Tokens that may follow. An answer that is scored becomes a prompt, which needs a place behind it."""
        room = self.settings.context - len(request.tokens)
        if not is_scored(request.sampling):
            return room
        if room < 2:
            raise ContextOverflow("the prompt leaves no room for an answer that has to be scored", "shorten it")
        return room - 1

    async def cut(self) -> None:
        await self._call("cut", deadline=_CONTROL_SECONDS)

    async def go_on(self) -> None:
        """Do nothing: the server samples what it is asked for, and it is asked for nothing while answers are held."""

    async def sleep(self) -> bool:
        """vLLM's sleep mode (`--enable-sleep-mode`): weights go to the host's memory, cached keys and values go."""
        return self.shared is None and bool(await self._call("sleep", deadline=_WEIGHTS_SECONDS))

    async def wake(self) -> None:
        await self._call("wake", deadline=_WEIGHTS_SECONDS)

    # ------------------------------------------------------------ weights

    async def rewrite(self, method: str, argument: list[Any]) -> list[Any]:
        answers: list[Any] = await self._call(method, argument, deadline=_WEIGHTS_SECONDS)
        return answers

    async def announce(self, version: int) -> None:
        await self._call("rillflow_announce", version, deadline=_CONTROL_SECONDS)

    async def call_adapters(self, what: str, *arguments: Any) -> Any:
        return await self._call(what, *arguments, deadline=_WEIGHTS_SECONDS)


class _Chosen:
    """The experts of one attempt as vLLM returns them: of all layers, also of those without a router."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._shape = (0, 0)
        self._tokens = 0

    def add(self, part: rillflow_channel.Part) -> None:
        self._tokens += len(part.tokens)
        if part.experts:
            self._pieces.append(part.experts)
            self._shape = part.shape

    def packed(self, layers: tuple[int, ...], prompt: int) -> bytes:
        """Return the choices of the layers with routers. They cover a prompt of this many tokens and the answer but its
        last token."""
        if not self._pieces:
            raise EngineError(
                "vLLM returned no experts", "a server that runs already needs --enable-return-routed-experts"
            )
        chosen_NLK = np.frombuffer(b"".join(self._pieces), "<u2").reshape(-1, *self._shape)
        expected = prompt + self._tokens - 1
        if len(chosen_NLK) != expected:
            raise EngineError(
                f"vLLM returned the experts of {len(chosen_NLK)} tokens instead of {expected}", "is it a tried release?"
            )
        return pack(chosen_NLK[:, list(layers)].reshape(expected, -1))


def _seed(request: GenerateRequest) -> int | None:
    """An answer that goes on after a cut must not repeat the random numbers of its beginning."""
    seed = request.sampling.seed
    return None if seed is None else (seed + request.begun * _STRIDE) % (1 << 63)


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    with suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with session.get(url.rstrip("/") + "/health") as response:
            return response.status == 200
    return False
