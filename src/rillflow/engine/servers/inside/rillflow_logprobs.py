"""Two log-probs of each token, inside vLLM and SGLang: of the distribution that it was drawn from, and of the model's
own. In vLLM also the version of the weights that each token was drawn with.

Both servers return one kind only. A request that needs both asks for the log-prob of one top token. The server's
sampler is wrapped here, and the wrapper writes the drawn token's log-prob under the model's own distribution in that
place, with the token id -1 - version. A value with the id of a token was not written here (speculative decoding samples
elsewhere), so the reader refuses it.

Invariants: the wrapper changes no drawn token and no other value. A step in which no request asks for a top token
computes nothing more. No step waits for the device.

Imports only the standard library and torch: it runs in the server's environment, not in Rillflow's. Shape suffixes: R
rows, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

_WRITTEN_HERE = -1  # the id at version 0
_SGLANG_SAMPLE = "sglang.srt.layers.sampler.Sampler.forward"


def raw_logprobs(logits_RV: torch.Tensor, token_R: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of one token for each row of the model's own logits."""
    return logits_RV.gather(-1, token_R.long()[:, None])[:, 0] - logits_RV.logsumexp(-1)


def _kept(logits_RV: torch.Tensor) -> torch.Tensor:
    """Return a copy: samplers change logits in place."""
    return logits_RV.to(torch.float32, copy=True)


class VllmSampler:
    """The sampler of one of vLLM's two model runners. It also returns raw log-probs, and the `version`, which the
    worker sets when it writes weights."""

    version = 0

    def __init__(self, sampler: Any) -> None:
        if sampler.logprobs_mode != "processed_logprobs":
            raise ValueError(f"vLLM runs with --logprobs-mode {sampler.logprobs_mode}: processed_logprobs is needed")
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: torch.Tensor, *rest: Any, **named: Any) -> Any:
        batch = [*rest, *named.values()][0]
        if self._top_tokens(batch) != 1:
            return self._sampler(logits, *rest, **named)
        kept_RV = _kept(logits)
        output = self._sampler(logits, *rest, **named)
        found = output.logprobs_tensors
        found.logprobs[:, 1] = raw_logprobs(kept_RV, output.sampled_token_ids[:, 0])
        found.logprob_token_ids[:, 1] = _WRITTEN_HERE - self.version
        return output

    def _top_tokens(self, batch: Any) -> int | None:
        """Return the most top tokens that a request of the batch asks for."""
        if hasattr(batch, "max_num_logprobs"):  # the first model runner's
            most: int | None = batch.max_num_logprobs
            return most
        return int(self._sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np))


@functools.cache
def wrap_sglang_sampler() -> None:
    """Wrap the sampler of the SGLang process that this runs in, once."""
    sampler = importlib.import_module("sglang.srt.layers.sampler")
    if sampler.SGLANG_RETURN_ORIGINAL_LOGPROB:
        raise ValueError("SGLang runs with SGLANG_RETURN_ORIGINAL_LOGPROB: it must not be set")
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    before = sampler.Sampler.forward
    hooks.HookRegistry.register(_SGLANG_SAMPLE, sample_in_sglang, hooks.HookType.AROUND)
    hooks.HookRegistry.apply_hooks()
    if sampler.Sampler.forward is before:
        raise ValueError(f"SGLang does not let {_SGLANG_SAMPLE} be wrapped")


def sample_in_sglang(sample: Any, sampler: Any, output: Any, *asked: Any, **named: Any) -> torch.Tensor:
    """Sample as SGLang's sampler does, and write raw log-probs into `output` for rows that ask for one top token."""
    _, return_logprob, top_tokens, *_ = asked
    rows = [row for row, number in enumerate(top_tokens) if number == 1] if return_logprob else []
    kept_RV = _kept(output.next_token_logits) if rows else None
    token_R: torch.Tensor = sample(sampler, output, *asked, **named)
    if kept_RV is not None:
        raw_R, written = raw_logprobs(kept_RV, token_R), token_R.new_full((1,), _WRITTEN_HERE)
        for row in rows:
            output.next_token_top_logprobs_val[row] = raw_R[row : row + 1]
            output.next_token_top_logprobs_idx[row] = written
    return token_R
