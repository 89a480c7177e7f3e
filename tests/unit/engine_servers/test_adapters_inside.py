"""The code that finds adapters inside vLLM, on a model that is wrapped as vLLM wraps it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rillflow.engine.servers import ModelFacts
from rillflow.engine.servers.adapters import lay_adapter
from rillflow.engine.servers.inside import rillflow_adapters as inside
from rillflow.engine.servers.inside.rillflow_weights import RillflowWorker
from rillflow.errors import WeightsError
from rillflow.weights.codec import LORA_A, LORA_B, Adapter

HIDDEN, ROWS, RANK, MAX_RANK = 8, {"q": 8, "k": 4, "v": 4, "o": 8}, 2, 8
SHAPES = {f"attn.{name}.weight": (rows, HIDDEN) for name, rows in ROWS.items()} | {"norm.weight": (HIDDEN,)}
FACTS = ModelFacts(Path(), "bf16", 30, SHAPES, {name: name for name in SHAPES})


class Linear(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, HIDDEN, dtype=torch.bfloat16), requires_grad=False)


class Wrapper(torch.nn.Module):
    """A layer of several slices, such as q, k and v, with two slots for adapters."""

    def __init__(self, layer: Linear, rows: list[int]) -> None:
        super().__init__()
        self.base_layer = layer
        self.n_slices = len(rows)
        self.lora_a_stacked = [torch.zeros(2, 1, MAX_RANK, HIDDEN, dtype=torch.bfloat16) for _ in rows]
        self.lora_b_stacked = [torch.zeros(2, 1, size, MAX_RANK, dtype=torch.bfloat16) for size in rows]

    def set_lora(self, slot: int, low: list[torch.Tensor], high: list[torch.Tensor]) -> None:
        for index, (a, b) in enumerate(zip(low, high, strict=True)):
            self.lora_a_stacked[index][slot, 0, : len(a)] = a
            self.lora_b_stacked[index][slot, 0, :, : b.shape[1]] = b


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Linear(16)
        self.o = Linear(8)


class Model(torch.nn.Module):
    """Its loader finds layers by the names that they have without wrappers."""

    def __init__(self, *, wrapped: bool = True) -> None:
        super().__init__()
        self.attn = Attention()
        self.norm = Linear(1)
        if not wrapped:
            return
        self.attn.qkv = Wrapper(self.attn.qkv, [8, 4, 4])  # type: ignore[assignment]
        self.attn.o = Wrapper(self.attn.o, [8])  # type: ignore[assignment]
        self.lora_manager = SimpleNamespace(
            modules={"attn.qkv": self.attn.qkv, "attn.o": self.attn.o, "embed": torch.nn.Module()},
            packed_modules_mapping={"qkv": ["q", "k", "v"]},
            lora_config=SimpleNamespace(max_lora_rank=MAX_RANK, max_loras=2),
            lora_index_to_id=[None, 7],
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters, first = dict(self.named_parameters()), {"q": 0, "k": 8, "v": 12}
        for name, loaded in weights:
            leaf = name.split(".")[-2]
            if leaf in first:
                parameters["attn.qkv.weight"].data.narrow(0, first[leaf], len(loaded)).copy_(loaded)
            elif leaf == "o":
                parameters["attn.o.weight"].data.copy_(loaded)
            else:
                parameters["norm.weight"].data.copy_(loaded[None])


def adapter(*names: str, alpha: float = 3.0) -> Adapter:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name in names or tuple(ROWS):
        tensors[f"attn.{name}.weight{LORA_A}"] = torch.randn(RANK, HIDDEN, generator=generator)
        tensors[f"attn.{name}.weight{LORA_B}"] = torch.randn(ROWS[name], RANK, generator=generator)
    return Adapter(tensors, RANK, alpha)


class World:
    def __init__(self, **settings: Any) -> None:
        self.model = Model(**settings)
        self.worker: Any = RillflowWorker()
        self.worker.model_runner = SimpleNamespace(model=self.model)

    def activate(self, added: Adapter) -> None:
        """Fill the slot as vLLM does from a peft folder."""

        def of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            low, high = (added.tensors[f"attn.{name}.weight{end}"] for end in (LORA_A, LORA_B))
            return low.bfloat16(), (added.alpha / added.rank * high).bfloat16()

        q, k, v, o = (of(name) for name in ROWS)
        self.model.attn.qkv.set_lora(1, [q[0], k[0], v[0]], [q[1], k[1], v[1]])
        self.model.attn.o.set_lora(1, [o[0]], [o[1]])

    def wrong(self, added: Adapter) -> list[str]:
        laid = lay_adapter(added, FACTS)
        try:
            found: list[str] = self.worker.rillflow_adapter(7, str(laid.folder / "adapter_model.safetensors"))
            return found
        finally:
            laid.remove()


def test_the_layout_is_that_of_the_model_without_wrappers() -> None:
    shapes = {name: list(shape) for name, shape in SHAPES.items()}
    plain, wrapped = World(wrapped=False), World()
    found = wrapped.worker.rillflow_layout(shapes, "bfloat16")
    bare = plain.worker.rillflow_layout(shapes, "bfloat16")
    assert found["spread"] == bare["spread"]
    assert not found["uncovered"]
    assert bare["adapters"] is None
    layers = [f"attn.{name}" for name in sorted(ROWS)]
    assert found["adapters"] == {"rank": MAX_RANK, "slots": 2, "layers": layers}
    assert isinstance(wrapped.model.attn.qkv, Wrapper), "the wrappers are back"
    with pytest.raises(KeyError), inside.unwrapped(wrapped.model):
        raise KeyError
    assert isinstance(wrapped.model.attn.qkv, Wrapper)


def test_layers_hold_what_was_laid() -> None:
    world = World()
    world.activate(adapter())
    assert world.wrong(adapter()) == []


@pytest.mark.parametrize(
    ("spoil", "layer"),
    [
        (lambda model: model.attn.qkv.lora_a_stacked[1][1, 0, 1, 3].add_(1.0), "attn.k"),
        (lambda model: model.attn.qkv.lora_b_stacked[2][1, 0, 3, 1].add_(1.0), "attn.v"),
        (lambda model: model.attn.o.lora_a_stacked[0][1, 0, MAX_RANK - 1, 0].add_(1.0), "attn.o"),
        (lambda model: model.lora_manager.packed_modules_mapping["qkv"].__setitem__(0, "w"), "attn.q"),
    ],
)
def test_a_layer_that_holds_something_else_is_named(spoil: Any, layer: str) -> None:
    world = World()
    world.activate(adapter())
    spoil(world.model)
    assert world.wrong(adapter()) == [layer]


def test_parts_of_ranks_and_joined_slices_are_left_to_the_probe() -> None:
    world = World()
    world.activate(adapter())
    world.model.attn.o.lora_b_stacked = [torch.zeros(2, 1, 4, MAX_RANK)]  # half of its rows
    assert world.wrong(adapter()) == []
    world.model.lora_manager.packed_modules_mapping["o"] = ["o", "p"]  # type: ignore[attr-defined]
    assert world.wrong(adapter()) == []


def test_an_adapter_of_another_model_is_refused() -> None:
    good = adapter()
    for wrong in (
        {"attn.z.weight" + LORA_A: torch.ones(RANK, HIDDEN), "attn.z.weight" + LORA_B: torch.ones(4, RANK)},
        {"attn.q.weight" + LORA_A: torch.ones(RANK, HIDDEN)},
        {"attn.q.weight" + LORA_A: torch.ones(RANK, HIDDEN), "attn.q.weight" + LORA_B: torch.ones(4, RANK)},
    ):
        with pytest.raises(WeightsError, match="does not fit attn"):
            lay_adapter(Adapter(wrong, good.rank, good.alpha), FACTS)
