"""Adapters in vLLM: the plan of a policy, refusals, updates, and servers that several policies share."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rillflow.config import LoraConfig, PolicyConfig, TrainerConfig
from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.contracts import UNKNOWN, Patch, TakesAdapters
from rillflow.engine.build import build_engine, build_engines
from rillflow.engine.servers import adapters, vllm_server
from rillflow.engine.servers.adapters import AdapterPlan, plan_adapters
from rillflow.engine.servers.adding import SharedServer
from rillflow.engine.servers.vllm import VllmEngine
from rillflow.engine.servers.weights import ModelFacts, model_facts
from rillflow.errors import ConfigError, EngineError, EngineLost, WeightsError
from rillflow.types import Probe
from rillflow.weights.codec import LORA_A, LORA_B, Adapter
from rillflow.weights.fingerprint import fingerprint
from rillflow.weights.probe import ProbeMismatch

LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def policy(how: Any = "auto", *, dtype: Any = "fp32", kind: Any = "vllm", **lora: Any) -> PolicyConfig:
    engine = EngineConfig(kind=kind, device="cpu", dtype=dtype, server=ServerConfig(adapters=how))
    return PolicyConfig(model="tiny", engine=engine, trainer=TrainerConfig(lora=LoraConfig(**lora)))


# ---------------------------------------------------------------- the plan


def test_a_server_is_started_with_adapters_on_the_layers_that_have_one() -> None:
    settings = policy("native", rank=20)
    engine: Any = build_engine(settings, exact=False)
    command = vllm_server.command(engine.model, settings.engine, 1, adapters=engine.plan)
    pairs = dict(itertools.pairwise(command))
    assert "--enable-lora" in command
    assert (pairs["--max-lora-rank"], pairs["--max-loras"], pairs["--max-cpu-loras"]) == ("32", "3", "3")
    at = command.index("--lora-target-modules")
    assert command[at + 1 : at + 8] == LEAVES
    assert isinstance(engine, TakesAdapters)
    assert (engine.base, engine.adapters_refused) == (0, "")
    some = plan_adapters(policy("native", targets=["q_proj", "mlp.up_proj"]), engine.model)
    assert some is not None
    assert some.arguments(cpu=True)[-2:] == ["q_proj", "up_proj"]
    assert len(some.layers) == 4, "of two layers"


def test_a_server_without_adapters_is_started_as_before() -> None:
    plain = PolicyConfig(model="tiny", engine=EngineConfig(kind="vllm", device="cpu"))
    for settings, more in ((plain, {}), (policy("merged"), {}), (policy("native"), {"adapters": False})):
        engine: Any = build_engine(settings, exact=False, **more)
        assert engine.plan is None
        assert engine.adapters_refused
        assert "--enable-lora" not in vllm_server.command(engine.model, settings.engine, 1, adapters=engine.plan)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"rank": 513}, "rank 513 is above vLLM's highest, 512"),
        ({"targets": ["q_proj", "lm_head"]}, "targets has lm_head: vLLM adds"),
    ],
)
def test_what_vllm_cannot_add_is_merged_or_refused(
    asked: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    facts = model_facts("tiny", "fp32")
    assert plan_adapters(policy(**asked), facts) is None
    assert why in caplog.text
    with pytest.raises(ConfigError, match=f"adapters native does not work: .*{why}"):
        plan_adapters(policy("native", **asked), facts)


def test_on_a_cpu_adapters_are_merged_unless_the_recipe_asks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There vLLM samples a quarter as many tokens with an adapter (`python -m bench.adapters_update`)."""
    caplog.set_level(logging.INFO)
    facts = model_facts("tiny", "bf16")
    assert plan_adapters(policy("auto", dtype="bf16"), facts) is None
    assert "kernels for CPUs sample several times slower" in caplog.text
    assert plan_adapters(policy("native", dtype="bf16"), facts) is not None
    monkeypatch.setattr(adapters, "pick_device", lambda device: torch.device("cuda", 0))
    assert plan_adapters(policy("auto", dtype="bf16"), facts) is not None


def test_gpus_have_kernels_for_16_bits_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "pick_device", lambda device: torch.device("cuda", 0))
    facts = model_facts("tiny", "fp32")
    with pytest.raises(ConfigError, match=r"need 16 bits, engine\.dtype is fp32"):
        plan_adapters(policy("native"), facts)
    assert plan_adapters(policy("native", dtype="bf16"), facts) is not None


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"native is for engine\.kind vllm: SGLang gets merged weights"):
        policy("native", kind="sglang")
    assert policy("merged", kind="sglang").engine.server.adapters == "merged"
    for how in ("native", "merged"):
        with pytest.raises(ValidationError, match=r"is for policies with trainer\.lora"):
            PolicyConfig(model="tiny", engine=EngineConfig(kind="vllm", server=ServerConfig(adapters=how)))


def test_a_running_server_says_what_it_can_hold() -> None:
    plan = AdapterPlan(16, ("a.q_proj", "a.o_proj"))
    room = {"rank": 16, "slots": 2, "layers": ["a.k_proj", "a.o_proj", "a.q_proj"]}
    assert not plan.missing(room)
    assert "without --enable-lora" in plan.missing(None)
    assert "--max-lora-rank 8" in plan.missing(room | {"rank": 8})
    assert "--max-loras 1" in plan.missing(room | {"slots": 1})
    assert plan.missing(room | {"layers": ["a.q_proj"]}) == "vLLM has no adapters for a.o_proj"


# ---------------------------------------------------------------- updates


class Fake(VllmEngine):
    """A server that answers every call with what is prepared for it."""

    def __init__(self, **plan: Any) -> None:
        facts = ModelFacts(Path(), "fp32", 30, {"q.weight": (4, 6)}, {"q.weight": "q.weight"})
        planned = AdapterPlan(2, ("q",), **plan)
        super().__init__(facts, EngineConfig(kind="vllm", device="cpu"), adapters=planned)
        self.called: list[tuple[Any, ...]] = []
        self.resident: set[int] = set()
        self.score = -1.0
        self.wrong: list[str] = []
        self.trouble: EngineError | None = None

    async def bring_up(self) -> None:
        self.begin_with_base()

    async def lost(self) -> str:
        raise AssertionError

    async def tear_down(self) -> None: ...

    async def _call(self, what: str, *arguments: Any, deadline: float) -> Any:
        self.called.append((what, *arguments))
        if what == "add_adapter":
            trouble, self.trouble = self.trouble, None
            if trouble is not None:
                raise trouble
            assert {path.name for path in Path(arguments[1]).iterdir()} == {
                "adapter_config.json",
                "adapter_model.safetensors",
            }
            self.resident.add(arguments[0])
            assert len(self.resident) <= 2
        if what == "drop_adapter":
            self.resident.discard(arguments[0])
        if what == "rillflow_adapter":
            return [self.wrong, []]
        if what == "score":
            return [[self.score] * (len(prompt) - 1) for prompt in arguments[0]]
        if what == "rillflow_load":
            return [{"held": {"q.weight": []}, "seconds": {}}]
        return None


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr("rillflow.engine.servers.weights.verify", lambda *given: None)
    made = Fake()
    made._calls.release("down")
    return made


ADAPTER = Adapter({f"q.weight{LORA_A}": torch.ones(2, 6), f"q.weight{LORA_B}": torch.ones(4, 2)}, 2, 4.0)
PROBE = Probe(prompts=[[1, 2, 3]], logprobs=[[-1.0, -1.0]], tolerance=0.01)


async def test_an_adapter_is_proven_under_its_own_number(engine: Fake) -> None:
    for version in (1, 2, 3):
        await engine.apply_adapter(ADAPTER, 0, version, PROBE)
        assert (engine.version, engine.base, engine.resident) == (version, 0, {engine.adapter})
    added = [call[1] for call in engine.called if call[0] == "add_adapter"]
    assert len(set(added)) == 3
    scored = [call for call in engine.called if call[0] == "score"]
    assert [call[3] for call in scored] == added, "the probe names the new adapter"
    assert len({call[2] for call in scored}) == 3, "and no earlier entry of the prefix cache"
    order = [call[0] for call in engine.called[:4]]
    assert order == ["add_adapter", "rillflow_adapter", "score", "add_adapter"], "nothing was dropped before"


async def test_an_adapter_of_another_base_changes_nothing(engine: Fake) -> None:
    with pytest.raises(WeightsError, match="of version 3, the server holds 0"):
        await engine.apply_adapter(ADAPTER, 3, 4)
    assert (engine.version, engine.called) == (0, [])


@pytest.mark.parametrize("how", ["wrong", "refused"])
async def test_an_adapter_that_vllm_does_not_hold_changes_nothing(engine: Fake, how: str) -> None:
    await engine.apply_adapter(ADAPTER, 0, 1, PROBE)
    serving = engine.adapter
    if how == "wrong":
        engine.wrong = ["q"]
    else:
        engine.trouble = EngineError("vLLM: ValueError: rank")
    with pytest.raises(WeightsError, match=r"does not (hold|take) the adapter"):
        await engine.apply_adapter(ADAPTER, 0, 2, PROBE)
    assert (engine.version, engine.adapter, engine.resident) == (1, serving, {serving})
    assert engine.proven


async def test_an_adapter_that_fails_its_probe_serves_nothing_and_merged_weights_replace_it(engine: Fake) -> None:
    engine.score = -3.0
    with pytest.raises(ProbeMismatch):
        await engine.apply_adapter(ADAPTER, 0, 1, PROBE)
    assert (engine.version, engine.proven, engine.base) == (UNKNOWN, False, 0)
    engine.score = -1.0
    await engine.load({"q.weight": torch.ones(4, 6)}, 1, PROBE)
    assert (engine.version, engine.base, engine.adapter, engine.resident) == (1, 1, 0, set())
    assert engine.called[-2][:1] == ("score",)
    assert engine.called[-2][3] == 0
    with pytest.raises(WeightsError, match="the server holds 1"):
        await engine.apply_adapter(ADAPTER, 0, 2, PROBE)
    await engine.load({"q.weight": torch.ones(4, 6)}, 0, PROBE)
    await engine.apply_adapter(ADAPTER, 0, 2, PROBE)


async def test_differences_do_not_go_with_an_adapter(engine: Fake) -> None:
    await engine.apply_adapter(ADAPTER, 0, 1, PROBE)
    with pytest.raises(WeightsError, match="do not belong to an adapter"):
        await engine.patch(Patch(1, {}, {}), 2)
    assert engine.version == 1


async def test_a_server_that_is_lost_says_so(engine: Fake) -> None:
    engine.trouble = EngineLost("gone")
    with pytest.raises(EngineLost):
        await engine.apply_adapter(ADAPTER, 0, 1, PROBE)


# ---------------------------------------------------------------- a server of several policies


def shared_policies(count: int = 2, **other: Any) -> dict[str, PolicyConfig]:
    made = {f"p{number}": policy("shared", rank=4 * (number + 1)) for number in range(count)}
    if other:
        last = made[f"p{count - 1}"]
        made[f"p{count - 1}"] = last.model_copy(update={"engine": last.engine.model_copy(update=other)})
    return made


def test_policies_that_share_a_server_have_one_plan() -> None:
    policies = {**shared_policies(), "alone": policy("native")}
    engines: Any = build_engines(policies, exact=False)
    assert list(engines) == list(policies)
    first, second, alone = engines.values()
    assert first.shared is second.shared is not None
    assert first.plan is second.plan
    assert (first.plan.rank, first.plan.policies, first.plan.asked) == (8, 2, "shared")
    assert len({next(first._numbers), next(second._numbers), next(first._numbers)}) == 3
    assert (alone.shared, alone.plan.policies, alone.adapters_only) == (None, 1, False)
    assert first.adapters_only
    command = vllm_server.command(first.model, policies["p0"].engine, 1, adapters=first.plan)
    pairs = dict(itertools.pairwise(command))
    assert (pairs["--max-loras"], pairs["--max-num-seqs"]) == ("5", "128"), "on a CPU one slot stays empty"


def test_policies_that_cannot_share_a_server_are_refused() -> None:
    with pytest.raises(ConfigError, match="p0 and p1 share a server, but not all settings"):
        build_engines(shared_policies(slots=3), exact=False)
    apart: Any = build_engines(shared_policies(device="auto"), exact=False)
    assert apart["p0"].shared is not apart["p1"].shared
    for how in ("shared", "native"):
        with pytest.raises(ConfigError, match=f"{how} does not work for policy p: its trainer gives"):
            build_engines({"p": policy(how)}, exact=False, whole=["p"])
    merged: Any = build_engines({"p": policy()}, exact=False, whole=["p"])["p"]
    assert merged.plan is None
    with pytest.raises(ValidationError, match="remove url"):
        EngineConfig(kind="vllm", server=ServerConfig(adapters="shared", url="http://127.0.0.1:1"))


class Process:
    def __init__(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False


class Sharing(Fake):
    """An engine whose server starts at once, or does not."""

    fails = False

    async def start_server(self) -> tuple[str, str]:
        process: Any = Process()
        self.process = process
        if self.fails:
            raise EngineLost("it ended before it served")
        return f"url of {id(process)}", "token"


def sharing(count: int = 2) -> tuple[SharedServer, list[Sharing]]:
    server, engines = SharedServer(), [Sharing() for _ in range(count)]
    for engine in engines:
        engine.share(server, AdapterPlan(2, ("q",), "shared", count))
        engine._calls.release("down")
    return server, engines


async def test_engines_that_share_a_server_meet_in_one_process() -> None:
    server, (first, second) = sharing()
    addresses = await asyncio.gather(server.join(first), server.join(second))
    assert addresses[0] == addresses[1]
    assert first.process is second.process is not None
    old = first.process
    await server.leave(first, closing=False)  # it does not obey the first one
    assert not old.running
    assert await server.join(first) != addresses[0]
    await server.leave(second, closing=False)
    assert first.process is not None
    assert first.process.running, "the second one had left the old process only"
    await server.join(second)
    assert first.process is second.process
    await server.leave(second, closing=True)
    assert first.process.running
    await server.leave(first, closing=True)
    assert not first.process.running


async def test_a_server_that_does_not_start_is_started_by_the_next_engine() -> None:
    server, (first, second) = sharing()
    first.fails = True
    with pytest.raises(EngineLost):
        await server.join(first)
    assert first.process is not None
    assert not first.process.running
    await server.join(second)
    assert second.process is not first.process


async def test_a_shared_base_is_compared_and_never_written() -> None:
    _, (engine, _) = sharing()
    held = torch.ones(4, 6)

    async def rewrite(method: str, names: list[str]) -> list[Any]:
        assert method == "rillflow_fingerprints"
        return [{"q.weight": [[0, [4, 6], [6, 1], f"{fingerprint(held):x}"]]}]

    engine.rewrite = rewrite  # type: ignore[method-assign]
    await engine.apply_adapter(ADAPTER, 0, 1, PROBE)
    with pytest.raises(WeightsError, match="not the base of a server that several policies share"):
        await engine.load({"q.weight": 2 * held}, 2, PROBE)
    assert (engine.version, engine.base, len(engine.resident)) == (1, 0, 1)
    assert engine.proven
    await engine.load({"q.weight": held}, 0, PROBE)
    assert (engine.version, engine.base, engine.resident) == (0, 0, set())
    with pytest.raises(WeightsError, match="a base that is shared"):
        await engine.patch(Patch(0, {}, {}), 1)
    await engine.cut()
    await engine.go_on()
    assert not await engine.sleep()
    assert engine.called[-1] == ("cut",), "other policies go on, and the server's memory stays"


# ---------------------------------------------------------------- the start


class Starting(VllmEngine):
    """A vLLM that ends at once while it is asked for adapters."""

    def __init__(self, cause: str, **plan: Any) -> None:
        settings = EngineConfig(kind="vllm", device="cpu")
        super().__init__(model_facts("tiny", "fp32"), settings, adapters=AdapterPlan(2, ("q",), **plan))
        self.cause = cause
        self.starts: list[bool] = []

    async def _start(self) -> tuple[str, str]:
        self.starts.append(self.plan is not None)
        process: Any = SimpleNamespace(cause=lambda: self.cause, stop=self._stop)
        self.process = process
        return "url", "token"

    async def _stop(self) -> None: ...

    async def _wait_healthy(self, url: str) -> None:
        if self.plan is not None:
            raise EngineLost("it ended before it served")


async def test_a_model_that_vllm_has_no_adapters_for_is_merged_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    cause = "ValueError: MambaForCausalLM does not support LoRA yet."
    engine = Starting(cause)
    assert await engine.start_server() == ("url", "token")
    assert engine.starts == [True, False]
    assert engine.adapters_refused
    assert f"adapters are merged on the node's host: vLLM cannot serve this model with adapters: {cause}" in caplog.text
    with pytest.raises(ConfigError, match="native does not work: vLLM cannot serve this model"):
        await Starting(cause, asked="native").start_server()
    other = Starting("RuntimeError: out of memory")
    with pytest.raises(EngineLost, match="before it served"):
        await other.start_server()
    assert other.starts == [True]


async def test_a_server_without_room_for_adapters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(self: Any, what: str, *arguments: Any, deadline: float) -> Any:
        return [{"adapters": None}]

    monkeypatch.setattr(VllmEngine, "_call", call)
    monkeypatch.setattr(VllmEngine, "learn_layout", lambda self, layout: None)
    engine = Starting("")
    await engine._learn_layout()
    assert engine.adapters_refused
    with pytest.raises(ConfigError, match="without --enable-lora"):
        await Starting("", asked="native")._learn_layout()


def test_a_plan_does_not_depend_on_the_order_of_ranks() -> None:
    plan = AdapterPlan(1, ("q",))
    rooms = [replace(plan, rank=rank).arguments(cpu=False)[2] for rank in (1, 2, 8, 9, 257, 512)]
    assert rooms == ["1", "8", "8", "16", "320", "512"]
