"""The host's copy: bit for bit what was published, changed only by what was verified before."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from pull_world import Trainer, same

from rillflow.contracts import Patch
from rillflow.errors import CorruptData, WeightsError
from rillflow.weights.fingerprint import fingerprint
from rillflow.weights.manifest import VersionManifest
from rillflow.weights.node_weights import NodeWeights, Step


def step(trainer: Trainer, version: int, **changed: object) -> Step:
    manifest = trainer.store.manifest(version)
    paths = [trainer.store.path(version) / name for name in manifest.delta_files]
    return Step(msgspec.structs.replace(manifest, **changed), paths)


def steps(trainer: Trainer, first: int, last: int) -> list[Step]:
    return [step(trainer, version) for version in range(first, last + 1)]


def holding(trainer: Trainer, version: int = 0) -> NodeWeights:
    held = NodeWeights()
    held.replace(trainer.store.pull(version), trainer.store.manifest(version))
    return held


def patched(weights: dict[str, torch.Tensor], patch: Patch) -> dict[str, torch.Tensor]:
    """Return the weights of an engine after a patch."""
    result = {name: tensor.clone() for name, tensor in weights.items()}
    result["head"] = result["embed"]
    for name, (index_K, value_K) in patch.changes.items():
        flat = result[name].view(-1)
        if index_K is None:
            flat.copy_(value_K)
        else:
            assert bool((index_K[1:] > index_K[:-1]).all())
            flat[index_K] = value_K
    return result


def test_a_chain_is_one_patch(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish(6)
    for first, last in ((1, 1), (1, 5), (3, 4)):
        held = holding(trainer, first - 1)
        patch = held.advance(steps(trainer, first, last))
        assert held.version == last
        assert same(held.tensors, trainer.published[last])
        assert held.tensors["head"] is held.tensors["embed"]
        assert patch.base == first - 1
        assert set(patch.changes) == {"embed", "up", "scale"}  # once, though it has two names; not what stayed
        assert same(patched(trainer.published[first - 1], patch), trainer.published[last])
        assert patch.fingerprints == {name: fingerprint(held.tensors[name]) for name in patch.changes}
        assert held.fingerprints == {name: fingerprint(held.tensors[name]) for name in held.fingerprints}


def test_where_much_has_changed_all_of_a_tensor_goes(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish(1)
    trainer.publish(1, share=0.4)  # of itself dense
    trainer.publish(12, share=0.04)  # dense together
    for first, last in ((1, 1), (1, 3), (2, 13)):
        held = holding(trainer, first - 1)
        patch = held.advance(steps(trainer, first, last))
        assert patch.changes["up"].index_K is None
        assert same(patched(trainer.published[first - 1], patch), trainer.published[last])


def test_what_was_changed_back_is_as_it_was(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish(1)
    trainer.publish(1)
    for name, tensor in trainer.published[0].items():
        trainer.weights[name].copy_(tensor)
    trainer.store.publish(trainer.weights, 2, 1)
    held = holding(trainer)
    patch = held.advance(steps(trainer, 1, 2))
    assert same(held.tensors, trainer.published[0])
    assert same(patched(trainer.published[1], patch), trainer.published[0])


def test_a_tensor_of_whole_numbers_travels_too(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish(1)
    trainer.weights["steps"] += 5
    trainer.publish(1)
    held = holding(trainer)
    patch = held.advance(steps(trainer, 1, 1))
    assert held.tensors["steps"].tolist() == [5, 12]
    assert patch.changes["steps"].value_K.tolist() == [5, 12]


def unchanged(held: NodeWeights, trainer: Trainer, version: int = 0) -> bool:
    return held.version == version and same(held.tensors, trainer.published[version])


def test_a_step_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish(4)
    held = holding(trainer)
    good = trainer.store.manifest(1)
    with pytest.raises(WeightsError, match="needs version 1, not 0"):
        held.advance([step(trainer, 2)])
    for wrong in (
        {"fingerprints": good.fingerprints | {"up": "0" * 16}},
        {"fingerprints": good.fingerprints | {"still": "0" * 16}},  # which the delta does not touch
        {"fingerprints": good.fingerprints | {"up": "no number"}},
        {"fingerprints": good.fingerprints | {"unknown": "0" * 16}},
        {"tensors": {name: facts for name, facts in good.tensors.items() if name != "still"}},
    ):
        with pytest.raises(CorruptData):
            held.advance([step(trainer, 1, **wrong)])
        assert unchanged(held, trainer)
    assert held.advance([step(trainer, 1)]).base == 0


def test_a_delta_of_other_weights_is_refused(tmp_path: Path) -> None:
    trainer, other = Trainer(tmp_path / "a"), Trainer(tmp_path / "b", seed=1)
    trainer.publish(2)
    other.publish(2)
    held = holding(trainer)
    with pytest.raises((CorruptData, WeightsError)):
        held.advance([step(other, 1)])
    assert unchanged(held, trainer)


def test_the_steps_before_a_damaged_one_stand(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish(4)
    held = holding(trainer)
    (path,) = step(trainer, 3).paths
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptData):
        held.advance(steps(trainer, 1, 3))
    assert unchanged(held, trainer, 2)


def test_damage_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    """Also without the file's hash, which a source has checked before."""
    trainer = Trainer(tmp_path)
    trainer.publish(2)
    held = holding(trainer)
    taken = step(trainer, 1)
    (path,) = taken.paths
    data = path.read_bytes()
    draw = random.Random(0)
    for at in draw.sample(range(len(data)), 200):
        broken = bytearray(data)
        broken[at] ^= 1 << draw.randrange(8)
        path.write_bytes(broken)
        with pytest.raises((CorruptData, WeightsError)):
            held.advance([taken])
        assert unchanged(held, trainer)
    path.write_bytes(data)
    held.advance([taken])
    assert unchanged(held, trainer, 1)


def test_only_what_the_manifest_says_is_held(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish(1)
    manifest = trainer.store.manifest(0)
    held = holding(trainer)

    def refused(weights: dict[str, torch.Tensor], manifest: VersionManifest = manifest) -> None:
        with pytest.raises(CorruptData):
            held.replace(weights, manifest)
        assert unchanged(held, trainer)

    pulled = trainer.store.pull(0)
    refused({name: tensor for name, tensor in pulled.items() if name != "up"})
    refused(pulled | {"up": pulled["up"].float()})
    refused(pulled | {"up": pulled["up"] + 1})


def test_versions_of_before_there_were_deltas_can_be_held(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish(2)
    held = NodeWeights()
    held.replace(
        trainer.store.pull(0), msgspec.structs.replace(trainer.store.manifest(0), fingerprints={}), verified=True
    )
    held.advance([step(trainer, 1)])
    assert unchanged(held, trainer, 1)


def test_nothing_held_cannot_advance(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish(2)
    with pytest.raises(WeightsError, match="whole version first"):
        NodeWeights().advance([step(trainer, 1)])
