"""The probe that a trainer publishes is what its published weights say, in full fine-tuning and with LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from loop_world import Crash, Ledger, crash_at, start
from trainer_helpers import VOCAB, learner, random_rows, small_model

from rillflow.config import LoraConfig, PolicyConfig
from rillflow.trainer import lora
from rillflow.types import Probe
from rillflow.weights import FolderStore
from rillflow.weights.probe import BF16, FP32, ProbeMismatch, check, prompts


def policy(**settings: Any) -> PolicyConfig:
    return PolicyConfig.model_validate({"model": "tiny", **settings})


@torch.no_grad()
def scored(weights: dict[str, torch.Tensor]) -> list[list[float]]:
    """What a plain model says that has nothing but the published weights."""
    model = small_model(seed=99).to(weights["model.norm.weight"].dtype)
    model.load_state_dict(weights)
    ids_RT = torch.tensor(prompts(VOCAB, 512))
    logprob_RTV = model(ids_RT).logits[:, :-1].float().log_softmax(-1)
    values: list[list[float]] = logprob_RTV.gather(-1, ids_RT[:, 1:, None])[:, :, 0].tolist()
    return values


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 falls back, slowly
@pytest.mark.parametrize(("dtype", "published"), [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_probe_is_what_the_published_weights_say(dtype: str, published: str, adapted: bool) -> None:
    model, options = small_model(), {}
    if adapted:
        options["lora"] = LoraConfig(rank=4, alpha=6.0)
        lora.wrap(model.to(torch.bfloat16 if dtype == "bf16" else torch.float32), options["lora"])
    worker = learner(model, dtype=dtype, lr=0.05, **options)
    probe = worker.prober(policy(engine={"dtype": published}, trainer={"dtype": dtype}))
    wanted = torch.bfloat16 if published == "bf16" else torch.float32
    first = probe()
    assert first is not None
    before = scored(worker.weights(wanted))
    check(0, first, before)
    assert first.tolerance == (FP32 if dtype == published == "fp32" else BF16)
    for step in range(3):
        worker.step([random_rows(step)])
    second = probe()
    assert second is not None
    check(1, second, scored(worker.weights(wanted)))
    with pytest.raises(ProbeMismatch):
        check(1, second, before)


def test_trees_and_small_micro_batches_change_nothing_in_a_probe() -> None:
    plain, parts = learner().prober(policy())(), learner(trees=True, micro_tokens=40).prober(policy())()
    assert plain is not None
    assert parts is not None
    for one, other in zip(plain.logprobs, parts.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_recipe_can_do_without_probes() -> None:
    assert learner().prober(policy(weights={"probe": "off"}))() is None


def test_weights_that_give_no_numbers_have_no_probe() -> None:
    worker = learner()
    with torch.no_grad():
        worker._models["actor"].model.get_input_embeddings().weight.fill_(torch.nan)
    assert worker.prober(policy())() is None


def numbered() -> Any:
    """Probes that differ from call to call."""
    made: list[Probe] = []

    def probe() -> Probe:
        made.append(Probe(prompts=[[1, 2]], logprobs=[[-float(len(made))]], tolerance=0.5))
        return made[-1]

    return probe


def published(folder: Path) -> list[float | None]:
    store = FolderStore(folder / "w")
    probes = [store.manifest(version).probe for version in store.versions()]
    return [None if probe is None else probe.logprobs[0][0] for probe in probes]


@pytest.mark.parametrize("deltas", [False, True])
def test_every_version_is_published_with_the_probe_of_its_weights(tmp_path: Path, deltas: bool) -> None:
    start(tmp_path, Ledger(batches=3), deltas=deltas, probe=numbered())
    assert published(tmp_path) == [0.0, -1.0, -2.0, -3.0]


def test_a_trainer_that_begins_again_gives_its_version_a_probe(tmp_path: Path) -> None:
    """Made by the trainer that is there now: its recipe may say another tolerance."""
    ledger = Ledger(batches=3)
    ledger.before = crash_at("commit b2 3")
    with pytest.raises(Crash):
        start(tmp_path, ledger)
    assert published(tmp_path) == [None] * 3
    ledger.before = lambda event: None
    start(tmp_path, ledger, probe=numbered())
    assert published(tmp_path) == [None, None, 0.0, -1.0]


def test_a_manifest_without_a_probe_can_still_be_read() -> None:
    from rillflow.weights.manifest import VersionManifest

    old = {"files": {}, "version": 1, "parent": 0, "created": 1.0, "tensors": {}, "aliases": {}}
    assert msgspec.json.decode(msgspec.json.encode(old), type=VersionManifest).probe is None
