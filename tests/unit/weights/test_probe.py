"""The log-probs that a probe accepts, and the causes that it names for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rillflow.config import PolicyConfig, load_recipe
from rillflow.types import Probe
from rillflow.weights import probe as probing
from rillflow.weights.probe import ProbeMismatch, check, diagnose, prompts, tolerance_of

SIZE = 600  # of the vocabulary
ASKED = prompts(SIZE, 512)


def logits(seed: int) -> torch.Tensor:
    return 3.0 * torch.randn(probing.PROMPTS, probing.TOKENS, SIZE, generator=torch.Generator().manual_seed(seed))


def scores(of: torch.Tensor) -> list[list[float]]:
    """The log-probs of the prompts' tokens."""
    ids_RT = torch.tensor(ASKED)
    values: list[list[float]] = of[:, :-1].double().log_softmax(-1).gather(-1, ids_RT[:, 1:, None])[:, :, 0].tolist()
    return values


def noise(share: float) -> torch.Tensor:
    """A change that moves log-probs by this share of their spread, on average."""
    return share * 3.0 * np.sqrt(np.pi / 2) * torch.randn(logits(0).shape, generator=torch.Generator().manual_seed(99))


def made(of: torch.Tensor, tolerance: float = probing.FP32) -> Probe:
    return Probe(prompts=ASKED, logprobs=scores(of), tolerance=tolerance)


def policy(**settings: Any) -> PolicyConfig:
    return PolicyConfig.model_validate({"model": "tiny", **settings})


def test_prompts_are_the_same_for_all_versions_and_fit_any_context() -> None:
    assert prompts(SIZE, 512) == prompts(SIZE, 4096), "earlier versions can be told apart by them"
    assert {len(prompt) for prompt in ASKED} == {probing.TOKENS}
    assert {len(prompt) for prompt in prompts(SIZE, 10)} == {9}, "a server samples one token after a prompt"
    for size in (2, 8, 32, 151_936):
        assert all(0 <= token < size for prompt in prompts(size, 512) for token in prompt)
    assert all(SIZE // 8 <= token < SIZE // 2 for prompt in ASKED for token in prompt), "no special tokens"


def test_the_tolerance_is_that_of_the_coarsest_numbers_on_the_way() -> None:
    assert tolerance_of(policy()) == probing.FP32
    assert tolerance_of(policy(engine={"dtype": "bf16"})) == probing.BF16
    assert tolerance_of(policy(trainer={"dtype": "bf16"})) == probing.BF16
    server = {"arguments": ["--kv-cache-dtype", "fp8"]}
    assert tolerance_of(policy(engine={"kind": "vllm", "server": server})) == probing.QUANTISED
    assert tolerance_of(policy(weights={"probe": 0.7})) == 0.7
    assert probing.FP32 < probing.BF16 < probing.QUANTISED


@pytest.mark.parametrize(("written", "read"), [("off", "off"), ("on", "auto"), ("auto", "auto"), ("0.2", 0.2)])
def test_a_recipe_says_how_probes_are_compared(written: str, read: str | float) -> None:
    settings = load_recipe("quickstart", [f"policies.agent.weights.probe={written}"]).policies["agent"]
    assert settings.weights.probe == read
    assert settings.proves == (written != "off")


@pytest.mark.parametrize("tolerance", [probing.FP32, probing.BF16, probing.QUANTISED])
def test_log_probs_within_the_tolerance_are_accepted(tolerance: float) -> None:
    probe = made(logits(1), tolerance)
    check(3, probe, scores(logits(1)))
    check(3, probe, scores(logits(1) + noise(0.7 * tolerance)))
    with pytest.raises(ProbeMismatch, match="version 3 is not served, numerics") as caught:
        check(3, probe, scores(logits(1) + noise(2.0 * tolerance)))
    assert "weights.probe" in caught.value.hint


def test_one_token_that_rounding_moves_far_fails_nobody() -> None:
    moved = scores(logits(1))
    moved[2][7] -= 2.0
    check(0, made(logits(1), probing.BF16), moved)


def test_a_model_that_finds_all_tokens_alike_has_a_probe_too() -> None:
    flat = torch.zeros_like(logits(0))
    check(0, made(flat), scores(flat + 1e-4 * logits(1)))
    with pytest.raises(ProbeMismatch):
        check(0, made(flat), scores(logits(1)))


def test_the_previous_version_is_recognised() -> None:
    """Also where the update was small: between them lies little more than the tolerance."""
    old, new = logits(1), logits(1) + noise(2.0 * probing.FP32)
    found = diagnose(made(new), scores(old), {0: made(logits(5)), 6: made(old)})
    assert found.cause == "stale weights"
    assert "version 6" in found.why


def test_probes_of_other_prompts_do_not_count_as_earlier_versions() -> None:
    other = Probe(prompts=[row[::-1] for row in ASKED], logprobs=scores(logits(1)), tolerance=probing.FP32)
    assert diagnose(made(logits(2)), scores(logits(1)), {6: other}).cause == "wrong weights"


def test_other_weights_are_wrong_weights() -> None:
    for tolerance in (probing.FP32, probing.BF16):
        found = diagnose(made(logits(1), tolerance), scores(logits(2)), {0: made(logits(3))})
        assert found.cause == "wrong weights"
        assert "policies.*.model" in found.hint


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.4, 2.0])
def test_a_temperature_in_the_engines_log_probs_is_recognised(temperature: float) -> None:
    found = diagnose(made(logits(1), probing.BF16), scores(logits(1) / temperature), {})
    assert found.cause == "cut distribution"
    assert "temperature" in found.why


def test_tokens_without_a_probability_are_a_cut_distribution() -> None:
    least = logits(1).quantile(0.3, dim=-1, keepdim=True)
    cut = scores(logits(1).masked_fill(logits(1) < least, -torch.inf))
    with pytest.raises(ProbeMismatch, match="cut distribution"):
        check(1, made(logits(1), probing.QUANTISED), cut)


def test_what_is_no_number_or_not_there_is_refused() -> None:
    probe, good = made(logits(1), probing.QUANTISED), scores(logits(1))
    for bad in ([[float("nan")] * 31, *good[1:]], good[1:], []):
        with pytest.raises(ProbeMismatch, match="wrong weights"):
            check(1, probe, bad)
