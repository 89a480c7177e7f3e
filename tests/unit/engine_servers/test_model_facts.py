"""Facts on a model's weights without reading one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model_families import build
from rillflow.contracts import Change, Patch
from rillflow.engine.servers.weights import ModelFacts, model_facts
from rillflow.errors import ConfigError, WeightsError
from rillflow.weights.models import load_policy_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return model_facts("tiny", "fp32")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return dict(load_policy_model("tiny", "fp32", torch.device("cpu")).state_dict())


def test_they_are_those_that_are_published(facts: ModelFacts, weights: dict[str, torch.Tensor]) -> None:
    assert set(facts.aliases) == set(weights)
    assert facts.aliases[HEAD] == EMBEDDING, "tied in the shipped model"
    assert facts.vocabulary == 734
    whole = facts.whole(weights)
    assert set(whole) == set(facts.shapes) == set(weights) - {HEAD}
    only_head = {name: tensor for name, tensor in weights.items() if name != EMBEDDING}
    assert set(facts.whole(only_head)) == set(facts.shapes), "any of the tied names will do"


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Mixtral"])
def test_pieces_are_those_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    facts, saved, tensors = (
        model_facts(str(tmp_path), "fp32"),
        load_file(tmp_path / "model.safetensors"),
        model.state_dict(),
    )
    assert any(len(pieces) > 1 for pieces in facts.pieces.values())
    for name, pieces in facts.pieces.items():
        for key, offset, size, stride in pieces:
            assert torch.equal(saved.pop(key), tensors[name].as_strided(size, stride, offset))
    assert set(saved) == set(facts.shapes) - set(facts.pieces), "all others have their own names"


def test_other_weights_are_refused(facts: ModelFacts, weights: dict[str, torch.Tensor]) -> None:
    norm = "model.norm.weight"
    for wrong, match in [
        (weights | {"other": torch.ones(1)}, "not in the model"),
        ({name: tensor for name, tensor in weights.items() if name != norm}, "missing"),
        (weights | {norm: torch.ones(3)}, "shape"),
        (weights | {norm: weights[norm].bfloat16()}, "bfloat16"),
        (weights | {HEAD: weights[HEAD] + 1}, "tied"),
    ]:
        with pytest.raises(WeightsError, match=match):
            facts.whole(wrong)


def test_changes_are_checked(facts: ModelFacts) -> None:
    def patch(name: str, index: list[int] | None, value: torch.Tensor) -> Patch:
        return Patch(0, {name: Change(None if index is None else torch.tensor(index), value)}, {})

    norm = "model.norm.weight"
    assert set(facts.changes(patch(HEAD, [0, 5], torch.ones(2)))) == {EMBEDDING}
    assert set(facts.changes(patch(norm, None, torch.ones(128)))) == {norm}
    for name, index, value in [
        ("other", [0], torch.ones(1)),
        (norm, [0, 128], torch.ones(2)),
        (norm, [-1, 3], torch.ones(2)),
        (norm, [0], torch.ones(2)),
        (norm, None, torch.ones(127)),
        (norm, [0], torch.ones(1).half()),
    ]:
        with pytest.raises(WeightsError):
            facts.changes(patch(name, index, value))


def test_a_folder_without_a_model_is_named(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_facts(str(tmp_path), "fp32")
