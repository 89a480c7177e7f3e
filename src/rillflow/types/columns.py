"""The columns of a sample. Arrays travel as little-endian bytes, so a reader can map them without a copy."""

from __future__ import annotations

import re

COLUMNS: dict[str, str] = {
    "tokens": "<i4",  # prompt, tool and sampled ids of one root-to-leaf path
    "mask": "|u1",  # 1 where the token was sampled and trains in this sample
    "logprobs": "<f4",  # of the distribution that was sampled from (temperature, top-p, top-k); 0 where mask is 0
    "raw_logprobs": "<f4",  # of the untempered distribution, or NaN; 0 where mask is 0
    "temperatures": "<f4",  # that `logprobs` can be recomputed with; 0 where they cannot (greedy, top-p, top-k)
    "versions": "<i4",  # policy version that sampled the token; -1 where mask is 0
    "rewards": "<f4",  # given to the answer that ends with the token, NaN elsewhere; absent where no answer has its own
    "transcript": "|u1",  # UTF-8 JSON of the episode's messages, on the first sample of a trajectory only
    "answer": "|u1",  # UTF-8 JSON of what the workflow returned, beside the transcript, for rewards of whole groups
}
_OWN_COLUMN = re.compile(r"[a-z][a-z0-9_]{0,63}(_[NR])?\.(i4|i8|u1|f2|f4|f8)")


def column_dtype(name: str) -> str | None:
    """Return the dtype of a column: of `COLUMNS`, or a stage's own, whose name ends in it (`score_R.f4`); else None."""
    if name in COLUMNS:
        return COLUMNS[name]
    return f"<{name[-2:]}".replace("<u1", "|u1") if _OWN_COLUMN.fullmatch(name) else None
