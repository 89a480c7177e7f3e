"""The models of a trainer's roles, and LoRA adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_forward import gradients, micro
from trainer_helpers import small_model
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rillflow.config import KlConfig, LoraConfig, PolicyConfig, TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer import lora
from rillflow.trainer.attention import paths
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Alone
from rillflow.trainer.parallel.sharding import decoder_layers
from rillflow.trainer.roles import policy_model, reference_model, reward_model, scalar_model
from rillflow.weights.codec import merged

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    small_model().save_pretrained(path)
    return str(path)


def policy(folder: str, **settings: Any) -> PolicyConfig:
    return PolicyConfig(model=folder, trainer=TrainerConfig(**settings))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_that_trains_is_what_its_files_have(folder: str, dtype: str) -> None:
    model = policy_model(policy(folder, dtype=dtype), CPU)
    for name, tensor in small_model().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_recomputing_layers_changes_no_number_and_keeps_less(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.trainer.lm_head._FEW", 0)  # the head computes its logits again either way
    batch, seen = micro(), []
    for recompute in (False, True):
        settings = policy(folder, recompute=recompute)
        model = policy_model(settings, CPU)
        kept: list[int] = []

        def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            score_T, _ = PolicyForward(model, settings.trainer)(batch)
        seen.append((score_T.detach(), sum(kept), gradients(model, score_T)))
    assert torch.equal(seen[0][0], seen[1][0])
    assert seen[1][1] < seen[0][1] / 2
    assert all(torch.equal(gradient, seen[1][2][name]) for name, gradient in seen[0][2].items())


@pytest.mark.parametrize("recompute", [False, True])
def test_attention_is_never_computed_again(folder: str, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], paths.forward

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(paths, "forward", counted)
    settings = policy(folder, recompute=recompute, attention="sdpa")
    model = policy_model(settings, CPU)
    score_T, _ = PolicyForward(model, settings.trainer)(micro())
    score_T.sum().backward()
    assert len(calls) == len(decoder_layers(model))


def test_layers_are_found_in_order(folder: str) -> None:
    model = policy_model(policy(folder), CPU)
    assert decoder_layers(model) == list(model.model.layers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiled_layers_give_the_same_for_any_length(folder: str) -> None:
    torch._dynamo.reset()
    plain, fast = policy(folder), policy(folder, compile=True, recompute=True)
    one, other = policy_model(plain, CPU), policy_model(fast, CPU)
    eager, compiled = PolicyForward(one, plain.trainer), PolicyForward(other, fast.trainer)
    graphs = []
    for lengths in ((7, 4, 9), (5, 13), (3, 3, 3, 8), (4, 11, 6)):
        batch = micro(lengths)
        expected_T, found_T = eager(batch)[0], compiled(batch)[0]
        assert torch.allclose(expected_T, found_T, atol=1e-5)
        expected, found = gradients(one, expected_T), gradients(other, found_T)
        assert all(torch.allclose(found[name], expected[name], atol=1e-4) for name in expected)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[-2], "new lengths are compiled again and again"


def test_a_new_scalar_head_is_small_and_comes_from_the_seed(folder: str) -> None:
    first, again, other = (scalar_model(folder, CPU, TrainerConfig(), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    assert ScalarForward(first, TrainerConfig())(micro()).abs().max() < 2
    assert torch.equal(first.model.embed_tokens.weight, small_model().model.embed_tokens.weight)


def test_a_trained_scalar_head_is_kept(folder: str, tmp_path: Path) -> None:
    trained = scalar_model(folder, CPU, TrainerConfig(), seed=1)
    trained.save_pretrained(tmp_path)
    for loaded in (
        scalar_model(str(tmp_path), CPU, TrainerConfig(), seed=5),
        reward_model(str(tmp_path), CPU, TrainerConfig()),
    ):
        assert torch.equal(loaded.score.weight, trained.score.weight)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_a_policy_is_no_reward_model(folder: str) -> None:
    with pytest.raises(ConfigError, match="not a reward model"):
        reward_model(folder, CPU, TrainerConfig())


def test_the_reference_is_frozen_and_stays_behind(folder: str) -> None:
    settings = policy(folder, kl=KlConfig(), dtype="bf16")
    trained = policy_model(settings, CPU)
    reference = reference_model(settings, trained, CPU)
    assert reference is not trained
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert reference.dtype is torch.bfloat16


def test_with_lora_the_reference_is_the_policy_itself(folder: str) -> None:
    settings = policy(folder, kl=KlConfig(), lora=LoraConfig(rank=2))
    trained = policy_model(settings, CPU)
    assert reference_model(settings, trained, CPU) is trained
    named = policy(folder, kl=KlConfig(reference=folder), lora=LoraConfig(rank=2))
    assert reference_model(named, trained, CPU) is not trained


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[PreTrainedModel, TrainerConfig]:
    config = TrainerConfig(
        lora=LoraConfig(**{"rank": 4, "alpha": 6.0, **options}),
        lr=0.05,
        dtype="bf16" if dtype is torch.bfloat16 else "fp32",
    )
    model = small_model().to(dtype)
    assert config.lora is not None
    lora.wrap(model, config.lora, seed=3)
    return model, config


def trained(**options: Any) -> tuple[PreTrainedModel, TrainerConfig, Optimizer]:
    model, config = adapted(**options)
    optimizer = Optimizer(model, config, Alone())
    forward = PolicyForward(model, config)
    for _ in range(3):
        optimizer.zero()
        (-forward(micro())[0].sum()).backward()
        optimizer.update(0.1)
    return model, config, optimizer


def scores(model: PreTrainedModel, config: TrainerConfig, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return PolicyForward(model, config, **options)(micro())[0]


def test_new_adapters_change_nothing() -> None:
    assert torch.equal(scores(*adapted()), scores(small_model(), TrainerConfig()))


def test_only_adapters_train() -> None:
    model, config, optimizer = trained()
    before = small_model().state_dict()
    assert {name.rpartition(".lora_")[0] for name in optimizer.masters()} == {
        name for name, module in model.named_modules() if hasattr(module, "lora_A")
    }
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(tensor, before[name.replace(".base_layer.", ".")])
    assert not torch.equal(scores(model, config), scores(small_model(), config))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 falls back, slowly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_adapters_off_it_is_the_model_it_was_made_from(dtype: torch.dtype) -> None:
    model, config, optimizer = trained(dtype=dtype)
    assert {tensor.dtype for tensor in optimizer.masters().values()} == {torch.float32}
    plain = scores(small_model().to(dtype), TrainerConfig(dtype=config.dtype))
    on = scores(model, config)
    assert torch.equal(scores(model, config, adapters=False), plain)
    assert torch.equal(scores(model, config), on)
    assert not torch.equal(on, plain)


def test_adapters_go_on_training_after_they_were_off() -> None:
    model, config, optimizer = trained()
    scores(model, config, adapters=False)
    optimizer.zero()
    PolicyForward(model, config)(micro())[0].sum().backward()
    assert all(master.grad is not None for master in optimizer._masters.values())


def test_merged_weights_give_the_same_scores() -> None:
    model, config, optimizer = trained()
    plain = small_model(seed=5)
    weights = optimizer.weights(torch.float32)
    assert set(weights) == set(plain.state_dict())
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    plain.load_state_dict(weights)
    assert torch.allclose(scores(plain, TrainerConfig()), scores(model, config), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_published_adapter_becomes_the_same_weights(dtype: torch.dtype) -> None:
    """A reader's merge of base and adapter equals the trainer's weights, bit for bit."""
    _, config, optimizer = trained()
    base = {name: tensor.to(dtype) for name, tensor in small_model().state_dict().items()}
    adapter = optimizer.adapter()
    assert adapter is not None
    assert config.lora is not None
    assert (adapter.rank, adapter.alpha) == (4, 6.0)
    read = merged(base, adapter)
    assert all(torch.equal(read[name], tensor) for name, tensor in optimizer.weights(dtype).items())


def test_adapters_continue_bit_for_bit() -> None:
    _, _, first = trained()
    model, config = adapted()
    second = Optimizer(model, config, Alone())
    second.restore(first.masters(), first.moments(), first.steps)
    for one, other in ((first, second), (second, first)):
        assert all(torch.equal(t, other.masters()[name]) for name, t in one.masters().items())
        assert all(torch.equal(t, other.moments()[name]) for name, t in one.moments().items())
    assert torch.equal(scores(model, config), scores(first._model, config))


def test_they_are_drawn_from_the_seed() -> None:
    one, other = small_model(), small_model()
    lora.wrap(one, LoraConfig(rank=2), seed=1)
    torch.manual_seed(99)
    lora.wrap(other, LoraConfig(rank=2), seed=1)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in one.state_dict().items())


def test_named_layers_only() -> None:
    model, config = adapted(targets=["q_proj"])
    assert config.lora is not None
    assert {name.split(".")[-2] for name in lora.adapter(model, config.lora).weights} == {"q_proj"}


@pytest.mark.parametrize("targets", [["nothing"], ["lm_head"], ["embed_tokens"]])
def test_layers_that_cannot_have_one_are_refused(targets: list[str]) -> None:
    with pytest.raises(ConfigError, match="targets"):
        lora.wrap(small_model(), LoraConfig(targets=targets))


def test_layers_of_another_shape_are_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match="not a linear layer"):
        lora.wrap(model, LoraConfig(targets=["c_attn"]))


def test_a_head_with_an_adapter_runs_itself() -> None:
    model = small_model(tied=False)
    config = TrainerConfig(lora=LoraConfig(rank=2, targets=["lm_head"]), head_tokens=3)
    assert config.lora is not None
    lora.wrap(model, config.lora)
    forward = PolicyForward(model, config)
    forward(micro())[0].sum().backward()
    assert model.lm_head.lora_B["default"].weight.grad is not None
