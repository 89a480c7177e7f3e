"""An optimizer's state that was set aside comes back bit for bit, and takes no memory meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_optimizer import accumulate, config, quiet_bf16, same, stepped
from trainer_helpers import small_model

from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer import offload as offload_module
from rillflow.trainer import optimizer as optimizer_module
from rillflow.trainer.offload import Offload, OffloadingGenerator, check_offload
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Alone
from rillflow.trainer.roles import prepared


class Generator:
    """Looks at the optimizer at each begin and end."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.held: list[int] = []
        self.fails = False

    def begin(self, tensors: Any, version: int, probe: Any = None) -> None:
        self.held.append(held(self._optimizer))

    def end(self) -> None:
        self.held.append(held(self._optimizer))
        if self.fails:
            raise RuntimeError("the node has died")


def held(optimizer: Optimizer) -> int:
    """Bytes in memory of what only an update needs."""
    return sum(tensor.nbytes for tensor in optimizer.idle())


@quiet_bf16
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_is_away_while_samples_are_made_and_nothing_is_changed(dtype: str, tmp_path: Path) -> None:
    model = small_model()
    weights = sum(parameter.numel() for parameter in model.parameters())
    mine, other = stepped(2, model, dtype=dtype), stepped(2, dtype=dtype)
    whole = weights * 4 * (3 if dtype == "bf16" else 2)  # two moments, and masters beside a bf16 model
    assert held(mine) == whole
    generator = Generator(mine)
    room = OffloadingGenerator(generator, [mine], tmp_path)
    room.begin(mine.weights(torch.float32), 2)
    assert (held(mine), room.bytes) == (0, whole)
    room.begin({}, 2)  # a second begin: nothing is set aside twice
    assert room.bytes == whole
    room.end()
    assert (held(mine), room.bytes) == (whole, 0)
    assert generator.held == [whole, 0, 0], "the engine has its weights before, the node stops before they are back"
    assert list(tmp_path.iterdir()) == [], "a kill would leave nothing"
    assert same(mine, other)


def test_updates_go_on_exactly(tmp_path: Path) -> None:
    model = small_model()
    mine, other = Optimizer(model, config(), Alone()), stepped(4)
    aside = Offload(mine.idle, tmp_path)
    for step in range(4):
        aside.put()  # before the first update there is nothing to set aside
        aside.restore()
        mine.zero()
        accumulate(model, step)
        accumulate(model, step + 100)
        mine.update(0.25)
    assert same(mine, other)


def test_it_comes_back_when_the_node_fails(tmp_path: Path) -> None:
    mine = stepped(1)
    generator = Generator(mine)
    room = OffloadingGenerator(generator, [mine], tmp_path)
    room.begin({}, 1)
    generator.fails = True
    with pytest.raises(RuntimeError, match="died"):
        room.end()
    assert held(mine) > 0
    assert same(mine, stepped(1))


def test_nothing_trains_nothing_is_set_aside(tmp_path: Path) -> None:
    aside = Offload(list, tmp_path)
    aside.put()
    assert aside.bytes == 0
    aside.restore()


@quiet_bf16
@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bf16"}, {"optimizer": "muon"}, {"optimizer": "adamw_8bit"}], ids=str
)
def test_moments_are_away_between_updates_and_nothing_is_changed(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_module, "_PART", 600)  # several rules
    mine, other = stepped(4, offload="optimizer", **settings), stepped(4, **settings)
    assert len(mine._rules) > len(other._rules)
    assert sum(moment.nbytes for rule in mine._rules for moment in mine._moments_in(rule)) == 0
    assert same(mine, other)
    fresh = Optimizer(small_model(), config(offload="optimizer", **settings), Alone())
    fresh.restore(mine.masters(), mine.moments(), mine.steps)
    assert sum(moment.nbytes for rule in fresh._rules for moment in fresh._moments_in(rule)) == 0
    assert same(fresh, other)
    fresh.zero()
    accumulate(fresh._model, 9)
    fresh.update(1.0)
    other.zero()
    accumulate(other._model, 9)
    other.update(1.0)
    assert same(fresh, other)


def test_there_is_nothing_to_offload_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"trainer.offload: both .* runs on the CPU"):
        check_offload(TrainerConfig(offload="both", recompute=True), torch.device("cpu"))
    check_offload(TrainerConfig(), torch.device("cpu"))
    check_offload(TrainerConfig(offload="optimizer"), torch.device("cuda"))


def test_inputs_need_layers_that_are_recomputed() -> None:
    with pytest.raises(ValueError, match="offload: activations needs recompute"):
        TrainerConfig(offload="activations")
    with pytest.raises(ValueError, match="backend: accelerate has no offload"):
        TrainerConfig(offload="optimizer", backend="accelerate")


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("compile_", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_inputs_of_layers_come_back_exactly(monkeypatch: pytest.MonkeyPatch, *, compile_: bool) -> None:
    def gradients(**settings: Any) -> list[torch.Tensor]:
        model = prepared(small_model(), TrainerConfig(recompute=True, compile=compile_, **settings))
        accumulate(model, 3)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    moved: list[tuple[int, ...]] = []

    class Counting:
        """torch, as the module under test alone sees it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, shape: tuple[int, ...], **options: Any) -> torch.Tensor:
            moved.append(tuple(shape))
            return torch.empty(shape, **options)

    there = gradients()
    monkeypatch.setattr(offload_module, "torch", Counting())
    away = gradients(offload="activations")
    assert len(away) == len(there) > 0
    assert all(torch.equal(one, other) for one, other in zip(away, there, strict=True))
    layers = small_model().config.num_hidden_layers
    assert len(moved) == layers
    assert len(set(moved)) == 1


@pytest.mark.needs("cuda")
def test_on_a_gpu_it_goes_to_the_host(tmp_path: Path) -> None:
    tensors = [torch.randn(1024, 1024, device="cuda") for _ in range(3)]  # torch allocates multiples of 2 MiB
    before = [tensor.clone() for tensor in tensors]
    aside = Offload(lambda: tensors, tmp_path)
    for _ in range(2):
        there = torch.cuda.memory_allocated()
        aside.put()
        freed = there - torch.cuda.memory_allocated()
        assert freed == aside.bytes == 3 << 22
        aside.restore()
        assert all(torch.equal(one, two) for one, two in zip(tensors, before, strict=True))
