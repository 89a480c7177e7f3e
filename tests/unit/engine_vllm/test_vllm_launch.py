"""How vLLM is started, and which running ones are used."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from model_families import build
from rillflow.config import PolicyConfig, TrainerConfig
from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.engine.build import build_engine
from rillflow.engine.servers import vllm_server as server
from rillflow.engine.servers.adapters import plan_adapters
from rillflow.engine.servers.inside.rillflow_channel import SHUT, TOKEN
from rillflow.engine.servers.process import ServerProcess
from rillflow.engine.servers.vllm import VllmEngine, _seed
from rillflow.engine.servers.weights import model_facts
from rillflow.errors import ConfigError, EngineError, EngineLost
from rillflow.types import GenerateRequest, Sampling
from rillflow.weights.probe import PROMPTS


def settings(**server: object) -> EngineConfig:
    return EngineConfig(kind="vllm", slots=7, context=99, device="cpu", server=ServerConfig(**server))


def test_it_listens_on_loopback_and_shuts_all_its_routes() -> None:
    command = server.command(model_facts("tiny", "fp32"), settings(arguments=["--swap-space", "0"]), 4321)
    pairs = dict(itertools.pairwise(command))
    assert (pairs["--host"], pairs["--port"]) == ("127.0.0.1", "4321")
    assert (pairs["--max-num-seqs"], pairs["--max-model-len"], pairs["--dtype"]) == ("7", "99", "float32")
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert command[-2:] == ["--swap-space", "0"], "the user's last, so that they win"
    assert "secret" not in " ".join(command)
    environment = server.environment(settings(environment={"OMP_NUM_THREADS": "3"}), "secret")
    assert environment[TOKEN] == "secret"
    assert environment[SHUT]
    # vLLM caches compiled code by its own variables: none may differ at every start.
    assert not [name for name, value in environment.items() if name.startswith("VLLM_") and "secret" in value]
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "VLLM_SERVER_DEV_MODE" not in environment


def test_two_servers_do_not_draw_alike() -> None:
    facts = model_facts("tiny", "fp32")
    seeds = {dict(itertools.pairwise(c))["--seed"] for c in (server.command(facts, settings(), 1) for _ in "ab")}
    assert len(seeds) == 2


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://example.org", "http://127.0.0.1.example.org:80"])
def test_a_server_elsewhere_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="loopback"):
        server.running_server(settings(url=url, environment={TOKEN: "t"}))


def test_a_running_server_needs_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=TOKEN):
        server.running_server(settings(url="http://127.0.0.1:8000"))
    monkeypatch.setenv(TOKEN, "t")
    assert server.running_server(settings(url="http://127.0.0.1:8000/")) == ("http://127.0.0.1:8000", "t")


def test_what_servers_cannot_do_is_refused() -> None:
    plain = PolicyConfig(model="tiny", engine=settings())
    assert isinstance(build_engine(plain, exact=False), VllmEngine)
    with pytest.raises(ConfigError, match="deterministic"):
        build_engine(plain, exact=True)
    with pytest.raises(ConfigError, match="on_update"):
        build_engine(plain.model_copy(update={"engine": EngineConfig(kind="sglang", on_update="keep")}), exact=False)


def test_probes_have_room_beside_answers_that_go_on() -> None:
    facts = model_facts("tiny", "fp32")
    words = {
        on_update: server.command(facts, EngineConfig(kind="vllm", slots=32, on_update=on_update), 1)
        for on_update in ("refill", "keep")
    }
    slots = {name: int(dict(itertools.pairwise(command))["--max-num-seqs"]) for name, command in words.items()}
    assert slots == {"refill": 32, "keep": 32 + PROMPTS}


def test_answers_that_go_on_need_merged_weights() -> None:
    def policy(adapters: str) -> PolicyConfig:
        engine = {"kind": "vllm", "on_update": "keep", "dtype": "bf16", "server": {"adapters": adapters}}
        return PolicyConfig.model_validate({"model": "tiny", "engine": engine, "trainer": {"lora": {}}})

    facts = model_facts("tiny", "bf16")
    assert plan_adapters(policy("auto"), facts) is None
    with pytest.raises(ConfigError, match="keep needs merged weights"):
        plan_adapters(policy("native"), facts)


@pytest.mark.parametrize("words", [["--data-parallel-size", "2"], ["-dp=2"], ["--dp-size", "2"]])
def test_replicas_in_one_server_are_refused(words: list[str]) -> None:
    with pytest.raises(ValidationError, match=f"arguments has {words[0]}: a server answers for one replica only"):
        settings(arguments=words)


def test_experts_are_recorded_where_the_recipe_replays_them(tmp_path: Path) -> None:
    build("Qwen3-MoE").save_pretrained(tmp_path)
    facts = model_facts(str(tmp_path), "fp32")
    assert facts.router_layers == (0, 1)
    assert "--enable-return-routed-experts" in server.command(facts, settings(), 1, record=True)
    assert "--enable-return-routed-experts" not in server.command(facts, settings(), 1)
    replaying = PolicyConfig(model=str(tmp_path), engine=settings(), trainer=TrainerConfig(replay_routing=True))
    with pytest.raises(ConfigError, match="replay_routing does not work with vLLM on a CPU"):
        build_engine(replaying, exact=False)
    with pytest.raises(ConfigError, match="no router"):
        build_engine(replaying.model_copy(update={"model": "tiny"}), exact=False)
    with pytest.raises(ConfigError, match=r"replay_routing does not work with engine\.kind sglang"):
        build_engine(replaying.model_copy(update={"engine": EngineConfig(kind="sglang")}), exact=False)


async def test_an_interpreter_without_vllm_says_so(tmp_path: object) -> None:
    facts = model_facts("tiny", "fp32")
    with pytest.raises(EngineLost, match="cannot be started"):
        await VllmEngine(facts, settings(python="/no/such/python"), logs=tmp_path).start()  # type: ignore[arg-type]
    with pytest.raises(EngineLost, match="ended before it served") as caught:
        await VllmEngine(facts, settings(python="false"), logs=tmp_path).start()  # type: ignore[arg-type]
    assert caught.value.hint


async def test_a_model_that_ends_the_server_when_it_computes_is_named(tmp_path: Path) -> None:
    class Ending(VllmEngine):
        async def scores(self, prompts: object, version: int) -> list[list[float]]:
            raise EngineError("vLLM: EngineDeadError")

    engine = Ending(model_facts("tiny", "fp32"), settings())
    with pytest.raises(EngineLost, match="cannot compute with this model: vLLM: EngineDeadError"):
        await engine._try()
    (tmp_path / "log").write_text("ERROR [core.py:1512] AssertionError: CPU GDN attention requires BF16.\n")
    engine.process = ServerProcess([], environment={}, log=tmp_path / "log")
    with pytest.raises(EngineLost, match="cannot compute with this model: AssertionError: CPU GDN attention"):
        await engine._try()


def test_grammars_need_the_models_tokenizer(tmp_path: Path) -> None:
    facts = model_facts("tiny", "fp32")
    command = server.command(facts, settings(), 1)
    assert dict(itertools.pairwise(command))["--structured-outputs-config"] == '{"backend": "guidance"}'
    assert "--skip-tokenizer-init" not in command
    assert "--skip-tokenizer-init" in server.command(replace(facts, folder=tmp_path), settings(), 1)


def test_seeded_servers_draw_alike_whoever_else_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "pick_device", lambda device: torch.device("cuda", 0))
    assert server.environment(settings(seeded=True), "t")["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in server.environment(settings(), "t")
    facts, extra = model_facts("tiny", "fp32"), {"TRITON_ATTN", "--no-enable-prefix-caching", "--enforce-eager"}
    seeded = server.command(facts, settings(seeded=True).model_copy(update={"slots": 256}), 1)
    assert extra <= set(seeded)
    assert [seeded[seeded.index(word) + 1] for word in ("--max-num-seqs", "--max-num-batched-tokens")] == ["255"] * 2
    assert not extra & set(server.command(facts, settings(), 1))
    with pytest.raises(ValidationError, match=r"seeded is for engine\.kind vllm"):
        EngineConfig(kind="sglang", server=ServerConfig(seeded=True))


def test_a_continued_answer_has_a_seed_of_its_own() -> None:
    def seed(begun: int, given: int | None = 7) -> int | None:
        return _seed(GenerateRequest(id="r", tokens=[1], sampling=Sampling(seed=given), begun=begun))

    assert seed(0) == 7
    assert seed(3) != seed(0) != seed(4)
    assert 0 <= (seed(3) or -1) < 1 << 63
    assert seed(3, None) is None
