"""GSPO: the ratio of a row is the geometric mean of its tokens' ratios, and the row is clipped as a whole.

Each token carries the row's ratio with its own gradient (verl's token form). If all tokens of a row weigh the same, the
gradient equals that of the row's ratio itself (TRL's form).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rillflow.trainer.algorithms.common import WholeRows
from rillflow.trainer.algorithms.losses.clip import Clip, clipped_flags, clipped_surrogate

_HIGHEST_LOG_RATIO = 10.0


def row_ratio(tokens: WholeRows) -> torch.Tensor:
    log_T = tokens.means((tokens.new_T - tokens.old_T).detach())[tokens.row_T]
    return (tokens.new_T - tokens.new_T.detach() + log_T).clamp(max=_HIGHEST_LOG_RATIO).exp()


@dataclass(frozen=True)
class RowClippedLoss:
    clip: Clip

    def __call__(self, tokens: WholeRows) -> torch.Tensor:
        return clipped_surrogate(row_ratio(tokens), tokens.advantage_T, self.clip)

    def held(self, tokens: WholeRows) -> tuple[torch.Tensor, torch.Tensor]:
        return clipped_flags(row_ratio(tokens), tokens.advantage_T, self.clip)
