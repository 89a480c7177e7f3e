"""What an engine refuses before it begins."""

from __future__ import annotations

from rillflow.errors import ContextOverflow, EngineError
from rillflow.types import GenerateRequest


def check_request(request: GenerateRequest, *, context: int, vocabulary: int) -> None:
    """ContextOverflow when the prompt leaves no room for one token, EngineError when the request makes no sense."""
    tokens, sampling = request.tokens, request.sampling
    if len(tokens) >= context:
        raise ContextOverflow(
            f"the prompt has {len(tokens)} tokens, the context {context}: no room for one more",
            "shorten the prompt or raise the engine's context",
        )
    if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary:
        raise EngineError(f"a prompt needs token ids from 0 to {vocabulary - 1}", "is it the model's own tokenizer?")
    if (
        sampling.max_tokens < 1
        or sampling.top_k < 0
        or not (sampling.temperature >= 0.0 and 0.0 < sampling.top_p <= 1.0)
    ):
        raise EngineError(
            f"sampling out of range: {sampling}",
            "max_tokens is at least 1, temperature and top_k at least 0, top_p in (0, 1]",
        )
