"""Workers decode published deltas into the parameters of a model that is laid out as vLLM lays out its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_weights_inside import Ranks

from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.contracts import DecodesDeltas, Deltas
from rillflow.engine.servers import ModelFacts, Tainted
from rillflow.engine.servers.inside import rillflow_weights
from rillflow.engine.servers.inside.rillflow_weights import RillflowWorker
from rillflow.engine.servers.vllm import VllmEngine
from rillflow.engine.servers.weights import DeltaUpdate, check_layout, lay_whole
from rillflow.errors import EngineError, WeightsError
from rillflow.weights import delta_file
from rillflow.weights.delta_file import Part, piece_of
from rillflow.weights.fingerprint import fingerprint
from rillflow.weights.store import FolderStore

HIDDEN, WIDER = 16, 24
SHAPES = {
    "embed.weight": (40, HIDDEN),
    "q.weight": (16, HIDDEN),
    "k.weight": (8, HIDDEN),
    "v.weight": (8, HIDDEN),
    "o.weight": (HIDDEN, 16),
    "norm.weight": (HIDDEN,),
}
Weights = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """One rank that holds everything: q, k and v fused, o in rows with gaps between them, the embeddings twice."""

    def __init__(self) -> None:
        super().__init__()

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)

        self.embed, self.head = weight(40, HIDDEN), weight(40, HIDDEN)
        self.qkv, self.o, self.norm = weight(32, HIDDEN), weight(HIDDEN, WIDER), weight(HIDDEN)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            first = {"q.weight": 0, "k.weight": 16, "v.weight": 24}.get(name)
            if first is not None:
                self.qkv.data[first : first + loaded.shape[0]].copy_(loaded)
            elif name == "embed.weight":
                self.embed.data.copy_(loaded)
                self.head.data.copy_(loaded)
            elif name == "o.weight":
                self.o.data[:, :16].copy_(loaded)
            else:
                self.norm.data.copy_(loaded)


class World:
    """A trainer's store, and a server with one worker, which decodes `ahead` or when it is stopped."""

    ahead = False

    def __init__(self, folder: Path) -> None:
        self.store = FolderStore(folder, deltas=True)
        self._random = torch.Generator().manual_seed(0)
        self.weights = {name: torch.randn(shape, generator=self._random).bfloat16() for name, shape in SHAPES.items()}
        self.facts = ModelFacts(Path(), "bf16", 40, SHAPES, {name: name for name in SHAPES})
        self.model = Model()
        self.worker = RillflowWorker()
        self.worker.model_runner = SimpleNamespace(model=self.model)  # type: ignore[attr-defined]
        shapes = {name: list(shape) for name, shape in SHAPES.items()}
        check_layout(self.facts, [self.worker.rillflow_layout(shapes, "bfloat16")])
        self.model.load_weights(self.weights.items())
        self.store.publish(self.weights, 0, None)

    def publish(self, share: float = 0.05) -> int:
        version = self.store.highest() + 1
        for tensor in self.weights.values():
            places = torch.rand(tensor.shape, generator=self._random) < share
            places.view(-1)[0] = True
            tensor[places] = (tensor[places].float() * 1.01 + 0.001).bfloat16()
        self.store.publish(self.weights, version, version - 1)
        return version

    def deltas(self, base: int, head: int) -> Deltas:
        steps = [[self.store.path(version) / "delta.rfd"] for version in range(base + 1, head + 1)]
        return Deltas(base, steps, self.store.manifest(head).tensor_fingerprints())

    async def rewrite(self, method: str, argument: list[Any]) -> list[Any]:
        try:
            return [getattr(self.worker, method)(argument)]
        except ValueError as error:
            raise EngineError(f"vLLM: {error}") from error

    async def apply(self, deltas: Deltas) -> DeltaUpdate:
        update = DeltaUpdate(self.facts, deltas, self.rewrite, ahead=self.ahead)
        before = {name: parameter.clone() for name, parameter in self.model.state_dict().items()}
        await update.get_ready()
        assert all(torch.equal(before[name], parameter) for name, parameter in self.model.state_dict().items())
        await update.apply()
        await update.close()
        return update

    def assert_holds(self, weights: Weights) -> None:
        expected = Model()
        expected.load_weights(weights.items())
        held = self.model.state_dict()
        for name, tensor in expected.state_dict().items():
            assert torch.equal(held[name], tensor), name


@pytest.fixture(params=[False, True], ids=["stopped", "ahead"], autouse=True)
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "ahead", request.param)


async def prepared(world: World) -> list[Any]:
    """The argument of a call for the next version, which the worker has decoded."""
    head = world.publish()
    update = DeltaUpdate(world.facts, world.deltas(head - 1, head), world.rewrite, ahead=True)
    await update.get_ready()
    return update._steps


async def test_what_was_decoded_ahead_is_written(tmp_path: Path) -> None:
    world = World(tmp_path)
    steps = await prepared(world)
    for piece in steps[0]:  # nothing is read any more
        Path(piece[0]).write_bytes(b"")
    world.worker.rillflow_decode(steps)
    world.assert_holds(world.weights)
    assert world.worker.rillflow_ahead is None


async def test_what_was_decoded_ahead_of_other_weights_is_dropped(tmp_path: Path) -> None:
    world = World(tmp_path)
    old = {name: tensor.clone() for name, tensor in world.weights.items()}
    steps = await prepared(world)
    laid = lay_whole({name: tensor + 1 for name, tensor in old.items()})
    world.worker.rillflow_load(sorted(str(path) for path in laid.folder.iterdir()))
    laid.remove()
    world.model.load_weights(old.items())
    assert world.worker.rillflow_ahead is None
    world.worker.rillflow_decode(steps)
    world.assert_holds(world.weights)


async def test_too_many_changes_are_not_kept_beside_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rillflow_weights, "_AHEAD", 10)
    world = World(tmp_path)
    steps = await prepared(world)
    assert world.worker.rillflow_ahead is not None
    assert world.worker.rillflow_ahead.changes() is None
    world.worker.rillflow_decode(steps)
    world.assert_holds(world.weights)


async def test_a_step_that_is_not_decoded_in_time_is_decoded_after_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rillflow_weights, "_PATIENCE", 0.05)
    world, released = World(tmp_path), threading.Event()
    steps = await prepared(world)

    def stuck() -> Iterator[Any]:
        released.wait(60)
        yield from ()

    world.worker.rillflow_ahead = rillflow_weights._Ahead(steps, stuck())
    world.worker.rillflow_decode(steps)
    assert not released.is_set()
    released.set()
    world.assert_holds(world.weights)


async def test_every_parameter_becomes_what_was_published(tmp_path: Path) -> None:
    world = World(tmp_path)
    storages = [parameter.data_ptr() for parameter in world.model.parameters()]
    for share in (0.05, 1.0, 0.3):
        head = world.publish(share)
        update = await world.apply(world.deltas(head - 1, head))
        world.assert_holds(world.weights)
        assert set(update.seconds) == {"decode", "verify"}
    assert [parameter.data_ptr() for parameter in world.model.parameters()] == storages, "captured graphs stay valid"


async def test_several_versions_are_applied_one_after_the_other(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(4):
        head = world.publish()
    await world.apply(world.deltas(0, head))
    world.assert_holds(world.weights)


async def test_a_piece_may_hold_parts_of_tensors(tmp_path: Path) -> None:
    """As several ranks of a trainer write them."""
    world = World(tmp_path)
    new = {name: (tensor.float() * 1.01).bfloat16() for name, tensor in world.weights.items()}
    halves = [
        (Part("o.weight", 0, 128), Part("k.weight", 64, 64)),
        (Part("o.weight", 128, 128), Part("k.weight", 0, 64)),
    ]

    def joined(weights: Weights, parts: tuple[Part, ...]) -> torch.Tensor:
        return torch.cat([weights[name].view(-1)[first : first + count] for name, first, count in parts])

    pieces = [piece_of(parts, joined(world.weights, parts), joined(new, parts)).piece for parts in halves]
    path = tmp_path / "parts.rfd"
    path.write_bytes(b"".join(delta_file.write([piece for piece in pieces if piece is not None])))
    names = ("o.weight", "k.weight")
    await world.apply(Deltas(0, [[path]], {name: fingerprint(new[name]) for name in names}))
    world.assert_holds(world.weights | {name: new[name] for name in names})


@pytest.mark.parametrize("name", ["qkv", "o", "norm"])
async def test_weights_that_were_not_the_base_are_noticed(tmp_path: Path, name: str) -> None:
    world = World(tmp_path)
    head = world.publish()
    parameter = world.model.get_parameter(name).data
    parameter.view(-1)[1] += parameter.view(-1)[1]
    with pytest.raises(Tainted):
        await world.apply(world.deltas(0, head))


async def test_a_damaged_file_is_noticed(tmp_path: Path) -> None:
    world = World(tmp_path)
    head = world.publish()
    path = world.store.path(head) / "delta.rfd"
    data = bytearray(path.read_bytes())
    data[-2] ^= 8
    path.write_bytes(data)
    with pytest.raises(Tainted):
        await world.apply(world.deltas(0, head))


async def test_deltas_that_workers_cannot_decode_are_refused_before_anything_changes(tmp_path: Path) -> None:
    world = World(tmp_path)
    before = {name: tensor.clone() for name, tensor in world.weights.items()}
    deltas = world.deltas(0, world.publish())
    with pytest.raises(WeightsError, match="not in the model"):
        DeltaUpdate(ModelFacts(Path(), "bf16", 40, {}, {}), deltas, world.rewrite)
    tied = ModelFacts(Path(), "bf16", 40, SHAPES, {name: "embed.weight" for name in SHAPES})
    with pytest.raises(WeightsError, match="published apart"):
        DeltaUpdate(tied, deltas, world.rewrite)
    steps = torch.tensor([1]), torch.tensor([2])
    raw = piece_of((Part("norm.weight", 0, 1),), *steps).piece
    assert raw is not None
    (tmp_path / "raw.rfd").write_bytes(b"".join(delta_file.write([raw])))
    with pytest.raises(WeightsError, match=r"norm\.weight has a dtype"):
        DeltaUpdate(world.facts, deltas._replace(steps=[[tmp_path / "raw.rfd"]]), world.rewrite)
    world.assert_holds(before)


def test_an_engine_whose_ranks_hold_parts_of_tensors_says_so(tmp_path: Path) -> None:
    ranks = Ranks()
    shapes = {name: list(shape) for name, shape in ranks.facts.shapes.items()}
    engine = VllmEngine(ranks.facts, EngineConfig(kind="vllm", server=ServerConfig(decodes_deltas=True)))
    assert isinstance(engine, DecodesDeltas)
    assert engine.decoding_refused == ""
    engine.learn_layout(ranks.call("rillflow_layout", shapes, "bfloat16"))
    assert "its ranks hold parts of 5 tensors" in engine.decoding_refused
    off = VllmEngine(ranks.facts, EngineConfig(kind="vllm", server=ServerConfig(decodes_deltas=False)))
    assert off.decoding_refused == "engine.server.decodes_deltas is false"


@pytest.mark.parametrize(("asked", "why"), [(None, "its weights are on the host too"), (True, "")])
def test_a_server_on_a_cpu_decodes_deltas_only_if_asked_to(tmp_path: Path, asked: bool | None, why: str) -> None:
    world = World(tmp_path)
    shapes = {name: list(shape) for name, shape in SHAPES.items()}
    engine = VllmEngine(world.facts, EngineConfig(kind="vllm", server=ServerConfig(decodes_deltas=asked)))
    engine.learn_layout([world.worker.rillflow_layout(shapes, "bfloat16")])
    assert engine.decoding_refused.startswith(why)
    assert bool(engine.decoding_refused) == bool(why)
