"""Mixtures of experts: the balance loss of routers, and the engine's choices recorded and replayed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from packed_helpers import CPU, rows_of
from trainer_helpers import learner, random_rows

from model_families import VOCABULARY, build
from rillflow.config import TrainerConfig
from rillflow.engine.embedded.core import Core
from rillflow.engine.embedded.sampling import Grammars
from rillflow.engine.embedded.slots import Ticket
from rillflow.engine.experts import UNKNOWN, Recorder, pack, routers_of, tail, unpack
from rillflow.errors import ConfigError, CorruptData, EngineError
from rillflow.trainer.batches import EXPERTS, Databuffer, joined, with_experts
from rillflow.trainer.forward import PolicyForward, set_choices
from rillflow.trainer.packing import micro_batches
from rillflow.types import BatchSample, GenerateRequest, Row, Sampling

MIXTURES = ["Qwen3-MoE", "Mixtral"]
COMMON = list(range(3, 25))


def played(family: str) -> dict[str, tuple[list[int], list[float], np.ndarray]]:
    """Sample two answers to prompts with a common beginning, one after the other, so that the second copies it."""
    core = Core(build(family), 0, 2, 64, exact=False, keep=False, grammars=Grammars(None, VOCABULARY), record=True)
    made = {}
    for name, prompt in (("first", [*COMMON, 40, 41]), ("second", [*COMMON, 50])):
        request = GenerateRequest(id=name, tokens=prompt, sampling=Sampling(max_tokens=9, temperature=1.0))
        core.submit(Ticket(request, seed=7))
        while core.busy:
            core.step()
        chunks = [chunk for _, chunk in core.outbox.take()]
        tokens = [token for chunk in chunks for token in chunk.tokens]
        logprobs = [value for chunk in chunks for value in chunk.logprobs]
        assert not any(chunk.experts for chunk in chunks[:-1])
        made[name] = ([*prompt, *tokens], logprobs, unpack(chunks[-1].experts))
    assert core.stats().reused_tokens >= len(COMMON)
    return made


def own_choices(model: Any, tokens: list[int]) -> np.ndarray:
    recorder = Recorder(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return recorder.last()


def buffer_of(made: dict[str, tuple[list[int], list[float], np.ndarray]]) -> Databuffer:
    """The rows of these answers as a trainer reads them, with the experts of all tokens but the last."""
    rows = rows_of([tokens for tokens, _, _ in made.values()])
    rows.temperature_N.fill(1.0)
    payload = [
        {"experts": np.frombuffer(pack(np.pad(chosen, ((0, 1), (0, 0)), constant_values=UNKNOWN)), "u1")}
        for _, _, chosen in made.values()
    ]
    return with_experts(Databuffer(rows), [sample(len(tokens)) for tokens, _, _ in made.values()], payload)


def sample(tokens: int) -> BatchSample:
    return BatchSample(
        id="a", row=Row(unit="u", segment=0, offset=0, length=1), tokens=tokens, trained=1, reward=0.0, group="g",
        group_mean=0.0, group_std=0.0, group_size=1, staleness=0, truncated=False,
    )  # fmt: skip


@pytest.mark.parametrize("family", MIXTURES)
def test_an_engine_records_the_experts_of_every_token_that_it_read(family: str) -> None:
    for tokens, _, chosen_NW in played(family).values():
        assert np.array_equal(chosen_NW, own_choices(build(family), tokens[:-1]))


@pytest.mark.parametrize("trees", [False, True], ids=["packs", "trees"])
@pytest.mark.parametrize("family", MIXTURES)
def test_replay_takes_the_recorded_experts_and_matches_the_log_probs(family: str, trees: bool) -> None:
    made, model = played(family), build(family)
    data, config = buffer_of(made), TrainerConfig(replay_routing=True, trees=trees)
    (make,) = micro_batches(data, [], 4096, device=CPU, trees=trees)
    micro = make()
    score_T, _ = PolicyForward(model, config)(micro)
    scores = dict(zip(micro.source_T.tolist(), score_T.tolist(), strict=True))
    start = 0
    for tokens, logprobs, _ in made.values():
        first = start + len(tokens) - len(logprobs)
        assert [scores[at] for at in range(first, start + len(tokens))] == pytest.approx(logprobs, abs=1e-4)
        start += len(tokens)
    for router in routers_of(model):  # other routers would choose other experts
        torch.nn.init.normal_(router.weight.data)
    set_choices(model, None)
    assert not np.array_equal(own_choices(model, next(iter(made.values()))[0][:-1]), next(iter(made.values()))[2])
    recorder = Recorder(model)  # a hook after the replay's
    score_T, _ = PolicyForward(model, config)(micro)
    assert micro.layout.experts_PW is not None
    assert np.array_equal(recorder.last(), micro.layout.experts_PW.numpy())
    score_T.sum().backward()
    assert all(router.weight.grad is not None and router.weight.grad.any() for router in routers_of(model))


def test_without_replay_routers_choose_again() -> None:
    model = build("Qwen3-MoE")
    (make,) = micro_batches(buffer_of(played("Qwen3-MoE")), [], 4096, device=CPU)
    replaying, plain = PolicyForward(model, TrainerConfig(replay_routing=True)), PolicyForward(model, TrainerConfig())
    expected_T = plain(make())[0].detach()
    for router in routers_of(model):
        torch.nn.init.normal_(router.weight.data)
    changed_T, recorder = plain(make())[0].detach(), Recorder(model)
    replaying(make())
    plain(make())
    assert not np.array_equal(recorder.last(), make().layout.experts_PW.numpy())  # type: ignore[union-attr]
    assert not torch.allclose(changed_T, expected_T, atol=1e-3)


def test_the_balance_loss_is_the_library_s_own() -> None:
    model, tokens = build("Qwen3-MoE"), [5, 9, 3, 17, 20, 11, 6]
    (make,) = micro_batches(Databuffer(rows_of([tokens])), [], 4096, device=CPU)
    forward = PolicyForward(model, TrainerConfig(router_loss=0.5))
    forward(make())
    expected = model(input_ids=torch.tensor([tokens[:-1]]), output_router_logits=True, use_cache=False).aux_loss
    assert forward.balance is not None
    assert forward.balance.item() == pytest.approx(expected.item(), abs=1e-5)
    with torch.no_grad():
        forward(make())
    assert forward.balance is None


def test_the_balance_loss_is_trained_and_told() -> None:
    rows = random_rows(0)
    balanced, plain = (learner(build("Qwen3-MoE"), router_loss=factor, lr=0.02) for factor in (5.0, 0.0))
    told = [balanced.step([rows], lambda: None, lambda: None)["router_loss"] for _ in range(6)]
    assert told[-1] < told[0]
    assert told[-1] >= 1.0
    assert "router_loss" not in plain.step([rows], lambda: None, lambda: None)


def test_models_without_routers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no router"):
        PolicyForward(build("Llama"), TrainerConfig(router_loss=0.1))
    with pytest.raises(ConfigError, match="padded"):
        PolicyForward(build("Qwen3-Next"), TrainerConfig(replay_routing=True))
    with pytest.raises(EngineError, match="Llama"):
        Recorder(build("Llama"))


def test_choices_of_another_model_are_refused() -> None:
    data = buffer_of({"odd": ([1, 2, 3, 4], [0.0], np.zeros((3, 3), np.uint16))})
    (make,) = micro_batches(data, [], 4096, device=CPU)
    with pytest.raises(ConfigError, match="3 experts for a token, and the model has 2 routers"):
        PolicyForward(build("Mixtral"), TrainerConfig(replay_routing=True))(make())


def test_rows_without_choices_leave_the_routers_their_own() -> None:
    rows, one = rows_of([[1, 2, 3], [4, 5, 6, 7]]), np.arange(12, dtype=np.uint16).reshape(3, 4)
    column = np.frombuffer(pack(one), "u1")
    mixed = with_experts(Databuffer(rows), [sample(3), sample(4)], [{"experts": column}, {}])
    (make,) = micro_batches(mixed, [], 4096, device=CPU)
    found = make().layout.experts_PW
    assert found is not None
    assert sorted(found[:, 0].tolist()) == [-1, -1, -1, 0, 4]
    nothing = with_experts(Databuffer(rows), [sample(3), sample(4)], [{}, {}])
    (make,) = micro_batches(nothing, [], 4096, device=CPU)
    assert make().layout.experts_PW is None
    assert joined([mixed, nothing])[EXPERTS].dtype.itemsize == 8


def test_packed_choices_are_checked() -> None:
    chosen = np.arange(6, dtype=np.uint16).reshape(3, 2)
    assert np.array_equal(unpack(pack(chosen)), chosen)
    assert np.array_equal(unpack(tail(pack(chosen), 2)), chosen[2:])
    for damaged in (b"", b"\0\0\0\0", pack(chosen)[:-1]):
        with pytest.raises(CorruptData):
            unpack(damaged)
