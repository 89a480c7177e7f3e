"""From micro-batches to scores: against the model called row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_helpers import VOCAB, small_model
from transformers import PreTrainedModel, Qwen3ForSequenceClassification

from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.packing import Layout, MicroBatch


def micro(lengths: tuple[int, ...] = (7, 4, 9), seed: int = 0) -> MicroBatch:
    """Rows end to end; every second token is trained."""
    generator = torch.Generator().manual_seed(seed)
    length_S = np.array(lengths)
    start_S = np.cumsum(length_S) - length_S
    tokens_P = torch.randint(VOCAB, (int(length_S.sum()),), generator=generator)
    select_T = torch.cat([torch.arange(0, n, 2) + s for n, s in zip(lengths, start_S.tolist(), strict=True)])
    return MicroBatch(
        layout=Layout(
            tokens_P=tokens_P,
            position_P=torch.cat([torch.arange(n) for n in lengths]),
            start_S=start_S,
            length_S=length_S,
            parent_S=np.full(len(lengths), -1),
        ),
        select_T=select_T,
        target_T=torch.randint(VOCAB, (len(select_T),), generator=generator),
        row_T=torch.cat([torch.full(((n + 1) // 2,), row) for row, n in enumerate(lengths)]),
        rows=len(lengths),
        columns={"temperature_T": torch.rand(len(select_T), generator=generator) + 0.5},
        source_T=select_T.numpy(),
        depth_T=np.concatenate([np.arange(0, n, 2) for n in lengths]),
        kept_T=np.zeros(len(select_T), np.int64),
    )


def row_by_row(model: PreTrainedModel, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    layout = batch.layout
    rows = [layout.tokens_P[s : s + n] for s, n in zip(layout.start_S, layout.length_S, strict=True)]
    logits_PV = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    all_TV = torch.log_softmax(logits_PV[batch.select_T] / batch.columns["temperature_T"][:, None], -1)
    return all_TV.gather(1, batch.target_T[:, None])[:, 0], -(all_TV.exp() * all_TV).sum(-1)


def gradients(model: torch.nn.Module, scores_T: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (scores_T * torch.linspace(-1, 1, len(scores_T))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", [{}, {"attention": "padded"}, {"attention": "sdpa"}])
@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_are_those_of_each_row_alone(settings: dict[str, Any], tied: bool) -> None:
    model, batch = small_model(tied=tied), micro()
    full_T, entropy_T = row_by_row(model, batch)
    expected = gradients(model, full_T)
    ours_T, spread_T = PolicyForward(model, TrainerConfig(head_tokens=3, **settings))(batch)
    # fp32 sums in another order, by any BLAS: about 1e-6 off, and 1e-5 once gradients have added them up over tokens.
    assert torch.allclose(ours_T, full_T, atol=1e-5)
    assert torch.allclose(spread_T, entropy_T, atol=1e-5)
    found = gradients(model, ours_T)
    assert set(found) == set(expected)
    assert all(torch.allclose(found[name], expected[name], atol=1e-4, rtol=1e-4) for name in expected)


def test_values_of_a_scalar_model() -> None:
    torch.manual_seed(2)
    config = small_model().config
    config.num_labels, config.pad_token_id = 1, 0
    model, batch = Qwen3ForSequenceClassification(config).eval(), micro()
    value_T = ScalarForward(model, TrainerConfig())(batch)
    layout = batch.layout
    for select, value in zip(batch.select_T.tolist(), value_T.tolist(), strict=True):
        segment = int(np.searchsorted(layout.start_S, select, side="right")) - 1
        ids = layout.tokens_P[layout.start_S[segment] : select + 1]
        alone = model.score(model.model(input_ids=ids[None]).last_hidden_state[0, -1])
        assert alone.item() == pytest.approx(value, abs=1e-5)
    assert set(gradients(model, value_T)) == {name for name, _ in model.named_parameters()}


def test_a_model_without_a_scalar_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="score"):
        ScalarForward(small_model(), TrainerConfig())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 falls back, slowly
def test_bf16_is_close_to_fp32() -> None:
    model, batch = small_model(), micro()
    full_T, _ = PolicyForward(model, TrainerConfig())(batch)
    half_T, _ = PolicyForward(model.to(torch.bfloat16), TrainerConfig(dtype="bf16"))(batch)
    assert half_T.dtype is torch.float32
    assert torch.allclose(full_T, half_T, atol=0.5)  # bf16 has three digits: logits of some units are 0.1 off


@pytest.fixture
def one_process() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("head", ["tied", "own", "odd"])
def test_a_sharded_model_gives_the_same(head: str, one_process: DeviceMesh) -> None:
    class Odd(torch.nn.Linear):
        pass

    def model() -> PreTrainedModel:
        made = small_model(tied=head == "tied")
        if head == "odd":
            made.lm_head.__class__ = Odd
        return made

    batch = micro()
    plain, sharded = model(), model()
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=one_process)
    fully_shard(sharded, mesh=one_process)
    seen = []
    for one in (plain, sharded):
        score_T, _ = PolicyForward(one, TrainerConfig(head_tokens=3))(batch)
        seen.append((score_T.detach(), gradients(one, score_T)))
    assert torch.allclose(seen[0][0], seen[1][0], atol=1e-6)
    for name, gradient in seen[0][1].items():
        assert torch.allclose(gradient, seen[1][1][name].to_local(), atol=1e-5), name
