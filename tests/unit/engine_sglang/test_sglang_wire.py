"""SGLang's adapter against what a real server was seen to send (fixtures/README.md says how it was recorded).

The whole contract runs on a real server, in tests/engines; here are the shapes, and what goes wrong on the way.
"""

from __future__ import annotations

import asyncio
import json
import pickletools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from counting_engine import until
from drawn_from import GRID, drawn_from
from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.contracts import Change, Patch
from rillflow.engine.servers.inside.rillflow_sglang import ORDERS, Cuts, answer_name
from rillflow.engine.servers.sglang import SglangEngine
from rillflow.engine.servers.sglang_server import KEY, generate_body
from rillflow.engine.servers.weights import model_facts
from rillflow.errors import ConfigError, ContextOverflow, EngineError, EngineLost, WeightsError
from rillflow.types import Chunk, GenerateRequest, Grammar, Probe, Sampling
from rillflow.weights.fingerprint import fingerprint
from rillflow.weights.models import load_policy_model, pick_device
from rillflow.weights.probe import FP32, ProbeMismatch

FIXTURES = Path(__file__).parent / "fixtures"
PROMPT = [5, 6, 7, 8, 9]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Recorded:
    """Speaks SGLang's shapes: streams are the recorded ones, weights are held as they are ordered."""

    def __init__(self, orders: Path) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.stream = "stream_length.sse"
        self.status = 200
        self.scored = "length"
        self.held = dict(load_policy_model("tiny", "fp32", pick_device("cpu")).state_dict())
        self.spoils = False
        self._orders = orders
        self._aborted = asyncio.Event()

    def app(self) -> web.Application:
        routes: dict[str, Handler] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/begin_weight_update": self._done,
            "/update_weights_from_tensor": self._update,
            "/end_weight_update": self._done,
            "/flush_cache": self._done,
        }
        app = web.Application(middlewares=[self._noted])
        app.router.add_get("/model_info", self._done)
        for path, handler in routes.items():
            app.router.add_post(path, handler)
        return app

    @web.middleware
    async def _noted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("authorization") != "Bearer key":
            return web.Response(status=401)
        if request.method == "POST":
            self.asked.append((request.path, json.loads(await request.text() or "null")))
        return await handler(request)

    async def _done(self, request: web.Request) -> web.Response:
        return web.Response(body=(FIXTURES / "outcome_done.json").read_bytes())

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            return web.Response(status=self.status, text="not now")
        body = self.asked[-1][1]
        if isinstance(body["input_ids"][0], list):
            return web.json_response([self._scored(body | {"input_ids": ids}) for ids in body["input_ids"]])
        if not body.get("stream"):
            return web.json_response(self._scored(body))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in (FIXTURES / self.stream).read_bytes().split(b"\n\n"):
            if b'"type":"abort"' in event:
                await self._aborted.wait()
            await response.write(event + b"\n\n")
        return response

    def _scored(self, body: Any) -> Any:
        """A prompt's tokens have log-probs from -100 on, the first none."""
        asked = enumerate(body["input_ids"][body["logprob_start_len"] :])
        scored = [[None if not at else -100.0 - at, token, None] for at, token in asked]
        reason = {"type": self.scored, "length": 1}
        return {"output_ids": [1], "meta_info": {"finish_reason": reason, "input_token_logprobs": scored}}

    async def _abort(self, request: web.Request) -> web.Response:
        self._aborted.set()
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        order = json.loads((self._orders / "order.json").read_text())
        result = self._layout() if order["method"] == "rillflow_layout" else self._written(order["arguments"][0])
        (self._orders / answer_name(order["number"], 0)).write_text(json.dumps({"result": result}))
        return await self._done(request)

    def _layout(self) -> dict[str, Any]:
        spread = {name: [[0, [tensor.numel()], [1]]] for name, tensor in self.held.items()}
        return {"spread": spread, "devices": ["cpu"], "other_dtype": [], "unaligned": [], "uncovered": []}

    def _written(self, paths: list[str]) -> dict[str, Any]:
        from safetensors.torch import load_file

        given = {name: tensor for path in paths for name, tensor in load_file(path).items()}
        for entry, value in given.items():
            name, _, part = entry.rpartition(":")
            if not name:
                self.held[entry] = value
            elif part == "value":
                self.held[name].view(-1)[given[f"{name}:index"].long()] = value
        names = {entry.rpartition(":")[0] or entry for entry in given}
        if self.spoils:
            self.held[min(names)].view(-1)[0] += 1
        held = {name: [[0, [1], [1], f"{fingerprint(self.held[name]):016x}"]] for name in names}
        return {"held": held, "seconds": {"write": 0.01, "verify": 0.01}}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[Recorded, SglangEngine]]:
    recorded = Recorded(tmp_path)
    runner = web.AppRunner(recorded.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    engine = SglangEngine(model_facts("tiny", "fp32"), settings(f"http://127.0.0.1:{port}", tmp_path))
    await engine.start()
    recorded.asked.clear()
    yield recorded, engine
    await engine.close()
    await runner.cleanup()


def settings(url: str, orders: Path) -> EngineConfig:
    environment = {ORDERS: str(orders), KEY: "key"}
    return EngineConfig(kind="sglang", context=160, server=ServerConfig(url=url, environment=environment))


async def answer(engine: SglangEngine, **sampling: Any) -> list[Chunk]:
    request = GenerateRequest(id="r", tokens=PROMPT, sampling=Sampling(**sampling))
    return [chunk async for chunk in engine.generate(request)]


def tokens_of(name: str) -> list[int]:
    events = [json.loads(line[6:]) for line in (FIXTURES / name).read_text().splitlines() if "output_ids" in line]
    return [token for event in events for token in event["output_ids"]]


async def test_a_stream_gives_its_tokens_once_with_their_logprobs(server: tuple[Recorded, SglangEngine]) -> None:
    recorded, engine = server
    recorded.stream = "stream_both.sse"
    chunks = await answer(engine, max_tokens=20, temperature=0.5)
    assert [token for chunk in chunks for token in chunk.tokens] == tokens_of("stream_both.sse")
    assert chunks[-1].finish == "length"
    pairs = [pair for chunk in chunks for pair in zip(chunk.logprobs, chunk.raw_logprobs, strict=True)]
    assert len(pairs) == 20
    assert all(drawn != raw and drawn <= 0.0 >= raw for drawn, raw in pairs)
    ((path, body),) = recorded.asked
    assert path == "/generate"
    assert body["input_ids"] == PROMPT
    assert body["extra_key"].endswith("-0"), "the prefix cache must not cross versions"
    assert body["top_logprobs_num"] == 1
    assert body["sampling_params"] == {
        "temperature": 0.5, "top_p": 1.0, "top_k": -1, "max_new_tokens": 20, "stop_token_ids": [], "ignore_eos": True,
        "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
        "min_new_tokens": 0, "logit_bias": None,
    }  # fmt: skip


async def test_the_models_own_distribution_needs_no_second_log_prob(server: tuple[Recorded, SglangEngine]) -> None:
    recorded, engine = server
    chunks = await answer(engine, max_tokens=20)
    assert [chunk.logprobs for chunk in chunks] == [chunk.raw_logprobs for chunk in chunks]
    assert recorded.asked[0][1]["top_logprobs_num"] == 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 3}])
@pytest.mark.parametrize("stream", ["stream_length.sse", "stream_top.sse"])
async def test_an_answer_without_the_models_own_log_probs_is_refused_by_name(
    server: tuple[Recorded, SglangEngine], sampling: dict[str, Any], stream: str
) -> None:
    """From a server whose sampler is not wrapped, or that does not use it: nothing, or a top token's log-prob."""
    recorded, engine = server
    recorded.stream = stream
    with pytest.raises(EngineError, match="did not compute the model's own log-probs"):
        await answer(engine, max_tokens=20, **sampling)


async def test_a_probe_is_one_request_that_no_cache_answers(server: tuple[Recorded, SglangEngine]) -> None:
    recorded, engine = server
    asked = [[5, 6, 7], [8, 9, 10]]
    good = Probe(prompts=asked, logprobs=[[-101.0, -102.0]] * 2, tolerance=FP32)
    for _ in range(2):
        await engine.load(dict(recorded.held), 3, good)
    probes = [body for path, body in recorded.asked if path == "/generate"]
    assert [(body["input_ids"], body["logprob_start_len"]) for body in probes] == [(asked, 0)] * 2
    keys = {key for body in probes for key in body["extra_key"]}
    assert len(keys) == 2, "what the version cached when it was loaded before is not found again"
    assert all(key.startswith(engine.salt(3)) and key != engine.salt(3) for key in keys)
    with pytest.raises(ProbeMismatch, match="version 4 is not served"):
        await engine.load(dict(recorded.held), 4, Probe(prompts=asked, logprobs=[[-1.0, -9.0]] * 2, tolerance=FP32))
    assert engine.version == -1


@pytest.mark.parametrize(("kind", "named"), [("json", "json_schema"), ("regex", "regex"), ("lark", "ebnf")])
async def test_an_answer_under_a_grammar_comes_whole_and_scored(
    server: tuple[Recorded, SglangEngine], kind: Any, named: str
) -> None:
    recorded, engine = server
    (chunk,) = await answer(engine, max_tokens=20, grammar=Grammar(kind=kind, text="text"))
    made = tokens_of("stream_length.sse")
    assert (chunk.tokens, chunk.finish) == (made, "length")
    assert chunk.raw_logprobs == [-101.0 - at for at in range(len(made))]
    assert chunk.logprobs != chunk.raw_logprobs
    (_, asked), (_, scored) = recorded.asked
    assert asked["sampling_params"][named] == "text"
    assert (scored["input_ids"], scored["logprob_start_len"]) == (PROMPT + made, len(PROMPT) - 1)


async def test_an_answer_under_a_grammar_that_is_cut_is_sampled_anew(server: tuple[Recorded, SglangEngine]) -> None:
    recorded, engine = server
    recorded.stream = "stream_abort.sse"
    grammar = Grammar(kind="regex", text="a")
    asked = asyncio.create_task(answer(engine, max_tokens=len(tokens_of("stream_abort.sse")) + 20, grammar=grammar))
    await until(lambda: bool(recorded.asked))
    loading = asyncio.create_task(engine.load(dict(recorded.held), 7))
    await until(lambda: any(path == "/abort_request" for path, _ in recorded.asked))
    recorded.stream = "stream_length.sse"
    (chunk,) = await asked
    await loading
    assert (chunk.tokens, chunk.version) == (tokens_of("stream_length.sse"), 7)
    assert recorded.asked[-2][1]["input_ids"] == PROMPT, "from its beginning"


async def test_a_greedy_answer_stops_at_its_token(server: tuple[Recorded, SglangEngine]) -> None:
    recorded, engine = server
    recorded.stream = "stream_stop.sse"
    chunks = await answer(engine, max_tokens=20, temperature=0.0, stop_tokens=(402,))
    assert chunks[-1].finish == "stop"
    assert chunks[-1].tokens[-1] == 402
    assert all(value == 0.0 for chunk in chunks for value in chunk.logprobs), "a greedy choice is certain"
    assert any(value < 0.0 for chunk in chunks for value in chunk.raw_logprobs)
    assert recorded.asked[0][1]["sampling_params"]["ignore_eos"] is False


async def test_an_end_that_nobody_asked_for_is_gone_on_from(server: tuple[Recorded, SglangEngine]) -> None:
    recorded, engine = server
    recorded.stream = "stream_stop.sse"
    made = tokens_of("stream_stop.sse")
    chunks = await answer(engine, max_tokens=2 * len(made), stop_tokens=(3,))
    assert [token for chunk in chunks for token in chunk.tokens] == made * 2
    assert chunks[-1].finish == "length"
    assert recorded.asked[1][1]["input_ids"] == PROMPT + made
    assert recorded.asked[1][1]["sampling_params"]["max_new_tokens"] == len(made)


async def test_new_weights_cut_what_runs_and_it_goes_on(server: tuple[Recorded, SglangEngine]) -> None:
    recorded, engine = server
    recorded.stream = "stream_abort.sse"
    made = tokens_of("stream_abort.sse")
    stream = engine.generate(GenerateRequest(id="r", tokens=PROMPT, sampling=Sampling(max_tokens=len(made) + 20)))
    first = await anext(aiter(stream))
    loading = asyncio.create_task(engine.load(dict(recorded.held), 7))
    chunks = [first]
    async for chunk in stream:
        chunks.append(chunk)
        if chunk.version == 0:
            recorded.stream = "stream_length.sse"
    await loading
    assert [token for chunk in chunks for token in chunk.tokens] == made + tokens_of("stream_length.sse")
    later = [chunk for chunk in chunks if chunk.version == 7]
    assert [chunk.seam for chunk in later][:1] == ["weights"]
    assert not any(chunk.seam for chunk in later[1:])
    paths = [path for path, _ in recorded.asked]
    assert paths.index("/abort_request") < paths.index("/update_weights_from_tensor") < paths.index("/flush_cache")
    assert recorded.asked[-1][1]["extra_key"].endswith("-7")


async def test_a_patch_is_written_and_verified(server: tuple[Recorded, SglangEngine]) -> None:
    recorded, engine = server
    name = "model.layers.0.self_attn.k_proj.weight"
    new = recorded.held[name].clone()
    new.view(-1)[[3, 77]] += 1
    index_K = torch.tensor([3, 77])
    patch = Patch(0, {name: Change(index_K, new.view(-1)[index_K])}, {name: fingerprint(new)})
    await engine.patch(patch, 4)
    assert engine.version == 4
    assert torch.equal(recorded.held[name], new)
    with pytest.raises(WeightsError, match="version 0"):
        await engine.patch(patch, 5)
    recorded.spoils = True
    with pytest.raises(WeightsError, match=name):
        await engine.patch(patch._replace(base=4), 5)
    assert engine.version == -1, "nobody vouches for these weights"


@pytest.mark.parametrize(
    ("stream", "status", "kind", "message"),
    [
        ("stream_error.sse", 200, EngineError, "longer than the model's context"),
        ("outcome_done.json", 200, EngineLost, "without saying how"),
        ("stream_length.sse", 503, EngineLost, "not now"),
        ("stream_length.sse", 400, EngineError, "refused /generate with 400"),
    ],
)
async def test_what_goes_wrong_is_said(
    server: tuple[Recorded, SglangEngine], stream: str, status: int, kind: type[Exception], message: str
) -> None:
    recorded, engine = server
    recorded.stream, recorded.status = stream, status
    with pytest.raises(kind, match=message):
        await answer(engine)


async def test_a_refusal_of_weights_changes_no_version(server: tuple[Recorded, SglangEngine], tmp_path: Path) -> None:
    recorded, engine = server
    with pytest.raises(WeightsError, match="missing"):
        await engine.load({}, 3)
    assert engine.version == 0
    assert not recorded.asked


def test_a_server_elsewhere_or_without_orders_is_refused(tmp_path: Path) -> None:
    from rillflow.engine.servers.sglang_server import running_server

    with pytest.raises(ConfigError, match="loopback"):
        running_server(settings("http://10.0.0.8:30000", tmp_path))
    with pytest.raises(ConfigError, match=ORDERS):
        running_server(settings("http://127.0.0.1:30000", tmp_path / "missing"))


async def test_an_answer_of_the_loader_that_is_an_error_is_told(server: tuple[Recorded, SglangEngine]) -> None:
    recorded, engine = server
    answers = recorded._written
    recorded._written = lambda paths: answers(["/nowhere"])  # type: ignore[method-assign]
    with pytest.raises((WeightsError, EngineError)):
        await engine.load(dict(recorded.held), 3)
    assert engine.version != 3


GRAMMAR = Grammar(kind="regex", text="a")


@pytest.mark.parametrize(
    ("sampling", "most"), [(Sampling(max_tokens=500, top_k=5), 7), (Sampling(max_tokens=500, grammar=GRAMMAR), 6)]
)
def test_an_answer_that_is_scored_leaves_a_place_behind_it(sampling: Sampling, most: int) -> None:
    """Scoring reads prompt and answer as a prompt, behind which SGLang samples one token more."""
    body = json.loads(generate_body(GenerateRequest(id="r", tokens=[1, 2, 3], sampling=sampling), 10, "salt"))
    assert body["sampling_params"]["max_new_tokens"] == most
    full = GenerateRequest(id="r", tokens=[1] * 9, sampling=Sampling(grammar=GRAMMAR))
    with pytest.raises(ContextOverflow, match="no room"):
        generate_body(full, 10, "salt")


@pytest.mark.parametrize("sampling", [{"top_p": 0.8}, {"top_k": 5, "temperature": 0.6}])
def test_cuts_are_our_own_and_the_server_draws_from_all_that_is_left(sampling: dict[str, Any]) -> None:
    """SGLang's own come after its log-probs, and take `top_p` of the whole instead of what `top_k` leaves."""
    request = GenerateRequest(id="r", tokens=[1, 2, 3], sampling=Sampling(**sampling))
    body = json.loads(generate_body(request, 100, "salt"))
    asked = body["sampling_params"]
    assert (asked["top_p"], asked["top_k"]) == (1.0, -1)
    assert asked["custom_params"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | sampling
    named = json.loads(body["custom_logit_processor"])["callable"]
    (opcode, name, _), *_ = pickletools.genops(bytes.fromhex(named))
    assert (opcode.name, name) == ("GLOBAL", f"rillflow_sglang {Cuts.__name__}")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0, top_p=0.8, top_k=5)])
def test_nothing_is_cut_where_nothing_is_to_be(sampling: Sampling) -> None:
    body = json.loads(generate_body(GenerateRequest(id="r", tokens=[1, 2, 3], sampling=sampling), 100, "salt"))
    assert "custom_logit_processor" not in body
    assert "custom_params" not in body["sampling_params"]


def test_what_the_cuts_leave_is_what_is_drawn_from() -> None:
    """Each row as its own request asks, at the temperature that SGLang divides by afterwards."""
    cuts = [(t, p, k) for t, p, k in GRID if t > 0.0]
    logits = 3 * torch.randn(len(cuts), 97, generator=torch.Generator().manual_seed(1))
    asked = [{"temperature": t, "top_p": p, "top_k": k} for t, p, k in cuts]
    left = Cuts()(logits.clone(), asked)
    for row, cut, (temperature, top_p, top_k) in zip(logits, left, cuts, strict=True):
        expected = drawn_from(row[None], temperature, top_p, top_k)[0]
        assert torch.equal(cut.isneginf(), expected.isneginf())
        kept = ~expected.isneginf()
        assert (cut / temperature).log_softmax(-1)[kept].tolist() == pytest.approx(expected[kept].tolist(), abs=1e-5)


def test_more_than_the_vocabulary_and_equal_logits_are_kept() -> None:
    logits = torch.zeros(2, 5)
    assert torch.equal(
        Cuts()(
            logits,
            [{"temperature": 1.0, "top_k": 50, "top_p": 1.0}, {"temperature": 1.0, "top_k": 0, "top_p": 1e-9}],
        )
        .isneginf()
        .sum(-1),
        torch.tensor([0, 4]),
    )
