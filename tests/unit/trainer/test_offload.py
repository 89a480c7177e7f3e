"""An optimizer's state that was set aside comes back bit for bit, and takes no memory meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_optimizer import accumulate, config, quiet_bf16, same, stepped
from trainer_helpers import small_model

from rillflow.trainer.offload import Offload, OffloadingGenerator
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Alone


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
