"""Ranks that publish their shards together publish what one rank would. The ranks are real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from publishing_rank import EVERY, KEY, VERSIONS
from sharded_rank import model_of

from commands import Warm
from forked_ranks import run_ranks
from rillflow.weights import FolderStore
from rillflow.weights.manifest import check_signature
from rillflow.weights.probe import check as check_probe
from soak import repetitions

RANK = Path(__file__).with_name("publishing_rank.py")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("ranks", repetitions([3], [2, 3, 4]))
def test_shards_are_published_as_the_whole_is(warm: Warm, tmp_path: Path, ranks: int) -> None:
    run_ranks(RANK, ranks, tmp_path, str(tmp_path), warm=warm)
    for name in ("tied", "untied"):
        together, alone = FolderStore(tmp_path / name / "together"), FolderStore(tmp_path / name / "alone")
        assert together.versions() == alone.versions() == list(range(VERSIONS))
        for version in range(VERSIONS):
            compare(together, alone, version, ranks)
        assert not list((tmp_path / name / "together").glob(".*"))


def compare(together: FolderStore, alone: FolderStore, version: int, ranks: int) -> None:
    mine, other = together.manifest(version), alone.manifest(version)
    check_signature(mine, KEY, "the manifest")
    assert mine.fingerprints == other.fingerprints
    assert (mine.tensors, mine.aliases, mine.parent) == (other.tensors, other.aliases, other.parent)
    assert mine.delta_of == other.delta_of == (version - 1 if version else None)
    expected = {f"delta-{rank:05d}.rfd" for rank in range(ranks)} if version else set()
    assert set(mine.delta_files) == expected
    assert bool(mine.full_files) == (version % EVERY == 0)
    assert {name: mine.files[name] for name in mine.full_files} == {
        name: other.files[name] for name in other.full_files
    }
    assert all(path.name[0] != "." for path in together.path(version).iterdir()), "files of rows are removed"
    pulled, whole = together.pull(version), alone.pull(version)
    assert pulled.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(bits(pulled[name]), bits(tensor)), name
    probe = mine.probe
    assert probe is not None
    check_probe(version, probe, scores(whole, probe.prompts))


@torch.no_grad()
def scores(weights: dict[str, torch.Tensor], prompts: list[list[int]]) -> list[list[float]]:
    """Return the log-probs of one plain model with the published weights."""
    model = model_of(tied=weights["model.norm.weight"].dtype == torch.bfloat16)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    ids_RT = torch.tensor(prompts)
    logprob_RTV = model(ids_RT).logits[:, :-1].log_softmax(-1)
    values: list[list[float]] = logprob_RTV.gather(-1, ids_RT[:, 1:, None])[:, :, 0].tolist()
    return values
