"""The wrapped samplers of vLLM and SGLang, around samplers that change logits in place as the servers' own do."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from rillflow.engine.servers.inside import rillflow_logprobs
from rillflow.engine.servers.inside.rillflow_logprobs import VllmSampler, sample_in_sglang, wrap_sglang_sampler
from rillflow.engine.servers.inside.rillflow_weights import RillflowWorker

LOGITS = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
TOKENS = torch.tensor([3, 0, 49, 7])
RAW = LOGITS.log_softmax(-1).gather(-1, TOKENS[:, None])[:, 0]
DRAWN = (LOGITS / 0.6).log_softmax(-1).gather(-1, TOKENS[:, None])[:, 0]


class Tensors(NamedTuple):
    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor


class FakeVllm:
    """One of vLLM's samplers: it tempers the logits that it is given, and returns as many top tokens as are asked."""

    def __init__(self, mode: str = "processed_logprobs") -> None:
        self.logprobs_mode = mode
        self.sampling_states = SimpleNamespace(max_num_logprobs=max)

    def __call__(self, logits: torch.Tensor, *rest: Any, **named: Any) -> Any:
        (batch,) = (*rest, *named.values())
        top = batch.max_num_logprobs if hasattr(batch, "max_num_logprobs") else max(batch.idx_mapping_np)
        logprobs = logits.div_(0.6).log_softmax(-1)
        best = logprobs.topk(top)
        ids = torch.cat((TOKENS[:, None], best.indices), 1).int()
        values = torch.cat((logprobs.gather(-1, TOKENS[:, None]), best.values), 1)
        return SimpleNamespace(sampled_token_ids=TOKENS[:, None].int(), logprobs_tensors=Tensors(ids, values))


def first_runner(top: int) -> dict[str, Any]:
    return {"sampling_metadata": SimpleNamespace(max_num_logprobs=top)}


def second_runner(top: int) -> dict[str, Any]:
    return {"input_batch": SimpleNamespace(idx_mapping_np=[0, top, 0, 0])}


@pytest.mark.parametrize("batch", [first_runner, second_runner])
def test_vllm_returns_raw_log_probs_where_a_request_asks_for_one_top_token(batch: Any) -> None:
    output = VllmSampler(FakeVllm())(LOGITS.clone(), *batch(1).values())
    found = output.logprobs_tensors
    assert torch.allclose(found.logprobs[:, 0], DRAWN, atol=1e-5)
    assert torch.allclose(found.logprobs[:, 1], RAW, atol=1e-5)
    assert found.logprob_token_ids.tolist() == [[token, -1] for token in TOKENS.tolist()]


@pytest.mark.parametrize("batch", [first_runner, second_runner])
def test_vllm_computes_nothing_more_where_none_asks(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rillflow_logprobs, "raw_logprobs", None)
    found = VllmSampler(FakeVllm())(logits=LOGITS.clone(), **batch(0)).logprobs_tensors
    assert found.logprob_token_ids.tolist() == TOKENS[:, None].tolist()


def test_a_worker_wraps_its_sampler_once_and_only_a_sampler_of_the_right_mode() -> None:
    worker: Any = RillflowWorker()
    worker.model_runner = SimpleNamespace(sampler=FakeVllm())
    worker.rillflow_return_raw_logprobs()
    wrapped = worker.model_runner.sampler
    worker.rillflow_return_raw_logprobs()
    assert worker.model_runner.sampler is wrapped
    assert wrapped.logprobs_mode == "processed_logprobs", "everything else is the sampler's own"
    worker.model_runner.sampler = FakeVllm("raw_logprobs")
    with pytest.raises(ValueError, match="--logprobs-mode raw_logprobs"):
        worker.rillflow_return_raw_logprobs()
    worker.model_runner.sampler = None  # a rank of a pipeline that does not sample
    worker.rillflow_return_raw_logprobs()


def sglang_sample(sampler: Any, output: Any, info: Any, return_logprob: bool, top_tokens: list[int]) -> torch.Tensor:
    logprobs = output.next_token_logits.div_(0.6).log_softmax(-1)
    output.next_token_top_logprobs_val = [row.topk(k).values for row, k in zip(logprobs, top_tokens, strict=True)]
    output.next_token_top_logprobs_idx = [row.topk(k).indices for row, k in zip(logprobs, top_tokens, strict=True)]
    return TOKENS.int()


def test_sglang_returns_raw_log_probs_for_the_rows_that_ask_for_one_top_token() -> None:
    output = SimpleNamespace(next_token_logits=LOGITS.clone())
    assert sample_in_sglang(sglang_sample, None, output, None, True, [1, 0, 1, 2]).tolist() == TOKENS.tolist()
    values, ids = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
    assert [value.tolist() for value in values[:3]] == [
        pytest.approx([RAW[0].item()]),
        [],
        pytest.approx([RAW[2].item()]),
    ]
    assert [one.tolist() for one in ids[:3]] == [[-1], [], [-1]]
    assert len(values[3]) == 2
    assert ids[3].min() >= 0, "another request's top tokens are its own"


def test_sglang_computes_nothing_more_where_none_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rillflow_logprobs, "raw_logprobs", None)
    for asked in ((True, [0, 0, 0, 2]), (False, [1, 1, 1, 1])):
        output = SimpleNamespace(next_token_logits=LOGITS.clone())
        assert sample_in_sglang(sglang_sample, None, output, None, *asked).tolist() == TOKENS.tolist()


@pytest.mark.parametrize(("original", "error"), [(True, "SGLANG_RETURN_ORIGINAL_LOGPROB"), (False, "be wrapped")])
def test_an_sglang_that_cannot_return_both_is_refused_by_name(
    original: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, hooks = ModuleType("sampler"), ModuleType("hooks")
    sampler.SGLANG_RETURN_ORIGINAL_LOGPROB = original  # type: ignore[attr-defined]
    sampler.Sampler = SimpleNamespace(forward=sglang_sample)  # type: ignore[attr-defined]
    hooks.HookRegistry = SimpleNamespace(register=lambda *hook: None, apply_hooks=lambda: None)  # type: ignore[attr-defined]
    hooks.HookType = SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.sampler", sampler)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    with pytest.raises(ValueError, match=error):
        wrap_sglang_sampler()
