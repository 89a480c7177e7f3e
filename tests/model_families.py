"""Tiny random models of the families that people train, and what each part of the product does with them.

An outcome is `exact`, `slower` (exact, by a fallback) or `refused`, with the reason of the last two. A result that
differs from the model's own raises AssertionError: no part may be silently wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rillflow.config import LoraConfig, TrainerConfig
from rillflow.engine.embedded.core import Core
from rillflow.engine.embedded.forward import LeanForward
from rillflow.engine.embedded.sampling import Grammars
from rillflow.engine.embedded.slots import Ticket
from rillflow.errors import ConfigError, EngineError, RillflowError
from rillflow.trainer import lora
from rillflow.trainer.attention import choose
from rillflow.trainer.batches import Databuffer, Rows, no_rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.packing import micro_batches
from rillflow.types import GenerateRequest, Sampling

CPU = torch.device("cpu")
VOCABULARY, WINDOW = 64, 8
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Family, as the page names it: the library's type of model, and what differs from the common shape.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {"head_dim": 8}),
    "Qwen3-MoE": ("qwen3_moe", {**_EXPERTS, "head_dim": 8, "num_experts": 4, "norm_topk_prob": True}),
    "Mixtral": ("mixtral", {**_EXPERTS, "num_local_experts": 4, "sliding_window": None}),
    "gpt-oss": ("gpt_oss", {**_EXPERTS, "head_dim": 8, "num_local_experts": 4, "sliding_window": WINDOW}),
    "Gemma 2": ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}),
    "Gemma 3": ("gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}),
    "Mistral": ("mistral", {"head_dim": 8, "sliding_window": None}),
    "Mistral with a sliding window": ("mistral", {"head_dim": 8, "sliding_window": WINDOW}),
    "Phi-3": ("phi3", {"sliding_window": None}),
    "Granite": ("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "GLM-4": ("glm4", {"head_dim": 8}),
    "OLMo 2": ("olmo2", {}),
    "Cohere": ("cohere", {"logit_scale": 0.25}),
    "Nemotron": ("nemotron", {}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            **_EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "Qwen3-Next": (
        "qwen3_next",
        {
            **_EXPERTS, "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 24,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "Mamba 2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 8},
    ),
}  # fmt: skip

# vLLM's attention on CPUs knows few sizes of heads, and its experts multiples of 32.
_WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 32}
_WIDE_TOO: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "Mamba 2": {"intermediate_size": 256},
}  # fmt: skip


class Outcome(NamedTuple):
    word: str
    reason: str = ""


def refused(error: RillflowError) -> Outcome:
    """Return the refusal with the reason that it names, in short."""
    return Outcome("refused", error.message.rpartition(" trees: ")[2][:120])


def build(family: str, *, wide: bool = False, seed: int = 0) -> PreTrainedModel:
    """Return the family's model with the same random weights at every call, large enough that each matters."""
    return copy.deepcopy(_built(family, wide, seed))


@cache
def _built(family: str, wide: bool, seed: int) -> PreTrainedModel:
    kind, changes = FAMILIES[family]
    shape = _SHAPE | changes | (_WIDE | _WIDE_TOO.get(family, {}) if wide else {})
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter.data, 0.5, 1.5)
        elif "gate.weight" in name or "router.weight" in name:
            torch.nn.init.normal_(parameter.data)  # some families begin with routers of zeros
    return model


def random_rows() -> Rows:
    """Rows longer than the window, of which four share a beginning longer than what trees make use of."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, VOCABULARY, 20)
    tokens = [np.concatenate([common, rng.integers(3, VOCABULARY, more)]) for more in (9, 4, 15, 2)]
    tokens += [rng.integers(3, VOCABULARY, length) for length in (5, 26)]
    length_R = np.array([len(row) for row in tokens])
    count, total = len(tokens), int(length_R.sum())
    empty = no_rows()
    return Rows(
        **{
            name: np.zeros(count if name.endswith("_R") else total, column.dtype)
            for name, column in vars(empty).items()
            if name not in {"tokens_N", "mask_N", "temperature_N", "start_R", "length_R"}
        },
        tokens_N=np.concatenate(tokens).astype(np.int32),
        mask_N=np.concatenate([np.arange(length) % 3 != 0 for length in length_R]),
        temperature_N=np.ones(total, np.float32),
        start_R=np.cumsum(length_R) - length_R,
        length_R=length_R,
    )


@torch.no_grad()
def alone(model: PreTrainedModel, rows: Rows) -> torch.Tensor:
    """Return the log-prob of every token after the first, each row read alone by the model's own forward."""
    logprob_N = torch.zeros(len(rows.tokens_N))
    for start, length in zip(rows.start_R.tolist(), rows.length_R.tolist(), strict=True):
        ids = torch.from_numpy(rows.tokens_N[start : start + length].astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        logprob_N[start + 1 : start + length] = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprob_N


def assert_scores(forward: PolicyForward, rows: Rows, expected_N: torch.Tensor, *, trees: bool = False) -> None:
    """Compare the scores of all trained tokens, and check that every one has a gradient that is a number."""
    trained = 0
    for make in micro_batches(Databuffer(rows), [], 4096, device=CPU, trees=trees):
        micro = make()
        score_T, _ = forward(micro)
        # In fp32 recurrent layers add roundings up: 1.1e-4 at -5.7 was seen. A mistake is off by 1e-2 and more.
        torch.testing.assert_close(score_T, expected_N[torch.from_numpy(micro.source_T)], rtol=5e-5, atol=1e-4)
        (grad_T,) = torch.autograd.grad(score_T.square().sum(), [score_T], retain_graph=True)
        assert grad_T.isfinite().all()
        trained += len(score_T)
    assert trained == rows.mask_N.sum()


# ---------------------------------------------------------------- the parts


def engine(family: str) -> Outcome:
    """Two sequences that grow past the window, in one batch; the log-probs are those of the plain forward."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCABULARY, length).tolist() for length in (13, 5)]
    try:
        core = Core(build(family), 0, 2, 64, exact=False, keep=False, grammars=Grammars(None, VOCABULARY))
    except EngineError as error:
        return refused(error)
    said: dict[str, tuple[list[int], list[float]]] = {}
    for name, tokens in enumerate(prompts):
        sampling = Sampling(max_tokens=12, temperature=1.0)
        core.submit(Ticket(GenerateRequest(id=str(name), tokens=tokens, sampling=sampling), seed=name))
        said[str(name)] = ([], [])
    while core.busy:
        core.step()
    for ticket, chunk in core.outbox.take():
        said[ticket.request.id][0].extend(chunk.tokens)
        said[ticket.request.id][1].extend(chunk.logprobs)
    model = build(family)
    for prompt, (tokens, logprobs) in zip(prompts, said.values(), strict=True):
        ids = torch.tensor([*prompt, *tokens])
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        own_T = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), own_T, rtol=0, atol=1e-4)
    lean = isinstance(core._forward, LeanForward)
    return Outcome("exact") if lean else Outcome("slower", "the library's own forward")


def packs(family: str) -> Outcome:
    model, rows = build(family), random_rows()
    expected_N = alone(model, rows)
    try:
        assert_scores(PolicyForward(model, TrainerConfig()), rows, expected_N)
    except ConfigError as error:
        return refused(error)
    try:
        choose(build(family), "sdpa", CPU)
    except ConfigError as error:
        return Outcome("slower", "padded: " + error.message.partition(": ")[2])
    return Outcome("exact")


def trees(family: str) -> Outcome:
    model, rows = build(family), random_rows()
    expected_N = alone(model, rows)
    try:
        assert_scores(PolicyForward(model, TrainerConfig(trees=True)), rows, expected_N, trees=True)
    except ConfigError as error:
        return refused(error)
    return Outcome("exact")


def adapters(family: str) -> Outcome:
    """Log-probs with adapters are those of the merged weights, as engines load them."""
    model, config = build(family), LoraConfig(rank=2)
    try:
        lora.wrap(model, config, 0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=0.1)
        forward = PolicyForward(model, TrainerConfig(lora=config))
    except ConfigError as error:
        return refused(error)
    merged = build(family)
    merged.load_state_dict(lora.merged_weights(model, config, torch.float32))
    rows = random_rows()
    assert_scores(forward, rows, alone(merged, rows))
    return Outcome("exact")


PARTS: Mapping[str, Callable[[str], Outcome]] = {
    "embedded engine": engine, "packs": packs, "trees": trees, "LoRA": adapters
}  # fmt: skip
