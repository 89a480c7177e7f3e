"""Draws one token per row of logits, reproducibly and without a Python loop over rows.

Invariants: the token of a row depends on its logits, its settings, its seed and the absolute position of the token
in its sequence, on nothing else, so a request gives the same tokens alone or among neighbours, and one that is cut
and continued elsewhere from its produced ids goes on with the same random numbers. `logprobs` are of the
distribution that was drawn from (a greedy row draws from a point mass: 0.0), `raw_logprobs` of the untempered one,
from which no token is missing.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


class Settings(NamedTuple):
    """How each of R rows is drawn; `position` is where in its sequence the drawn token will stand."""

    temperature: Array
    top_p: Array
    top_k: Array
    seed: Array
    position: Array


class Allowed(NamedTuple):
    """Which tokens the rows `at` may draw; the others any."""

    at: Array
    flags_AV: torch.Tensor


class Drawn(NamedTuple):
    tokens: Array
    logprobs: Array
    raw_logprobs: Array


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_A
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_B
    return bits ^ (bits >> np.uint64(31))


def uniforms(seed: Array, position: Array) -> npt.NDArray[np.float64]:
    """One number in (0, 1) per row, a pure function of its seed and position."""
    counter = position.astype(np.uint64) * _GOLDEN
    bits = _mix(_mix(seed.astype(np.uint64) + _GOLDEN) + counter)
    # The middle of one of 2**52 cells: never 0 or 1, so the drawn token always has a positive weight.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def draw(logits_RV: torch.Tensor, settings: Settings, allowed: Allowed | None = None) -> Drawn:
    """Draw a token for every row. Passes over the vocabulary are only made for the rows that need them."""
    logits_RV = logits_RV.float()
    shifted_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
    uniform_R = _to(uniforms(settings.seed, settings.position), logits_RV)
    plain = (settings.temperature == 1.0) & (settings.top_p >= 1.0) & (settings.top_k == 0)
    if plain.all() and allowed is None:  # what rollouts do: the distribution drawn from is the raw one
        token_R, logprob_R = _invert(shifted_RV, uniform_R)
        tokens, logprobs = torch.stack((token_R.double(), logprob_R)).cpu().numpy()
        logprobs = logprobs.astype(np.float32)
        return Drawn(tokens.astype(np.int32), logprobs, logprobs)
    open_RV = shifted_RV if allowed is None else _masked(shifted_RV, allowed)
    token_R, logprob_R = _draw_shaped(open_RV, uniform_R, settings)
    picked_R = shifted_RV.gather(1, token_R[:, None])[:, 0].double()
    raw_R = picked_R - _total(shifted_RV, running=allowed is not None).log()
    tokens, logprobs, raw = torch.stack((token_R.double(), logprob_R, raw_R)).cpu().numpy()
    return Drawn(tokens.astype(np.int32), logprobs.astype(np.float32), raw.astype(np.float32))


def _masked(shifted_RV: torch.Tensor, allowed: Allowed) -> torch.Tensor:
    """Give tokens that are not allowed no weight, and the likeliest of the others the weight 1, however unlikely it is
    in the whole distribution. A row that may draw nothing has no finite weight: the caller sees its NaN log-prob."""
    index = _to(allowed.at, shifted_RV)
    rows_AV = shifted_RV[index].masked_fill(~allowed.flags_AV, -torch.inf)
    return shifted_RV.index_copy(0, index, rows_AV - rows_AV.amax(-1, keepdim=True))


def _total(shifted_RV: torch.Tensor, *, running: bool) -> torch.Tensor:
    """The normaliser of the raw distribution; as a running sum it is, bit for bit, that of a plain draw."""
    weight_RV = shifted_RV.exp()
    if running:
        return weight_RV.cumsum(-1, dtype=torch.float64)[:, -1]
    return weight_RV.sum(-1, dtype=torch.float64)


def _draw_shaped(
    shifted_RV: torch.Tensor, uniform_R: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with temperatures, cuts or greedy choice among them."""
    temperature = settings.temperature
    divisor_R = np.where(temperature == 0.0, np.float32(1.0), temperature).astype(np.float32)
    scaled_RV = shifted_RV / _to(divisor_R, shifted_RV)[:, None]
    token_R, logprob_R = _invert(scaled_RV, uniform_R)
    _cut_rows(scaled_RV, uniform_R, settings, token_R, logprob_R)
    _greedy_rows(shifted_RV, temperature, token_R, logprob_R)
    return token_R, logprob_R


def _to(values: Array, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device, non_blocking=True)


def _invert(scaled_RV: torch.Tensor, uniform_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse CDF. The one running sum serves as CDF and as normaliser; float64 keeps it monotone on every device."""
    cdf_RV = scaled_RV.exp().cumsum(-1, dtype=torch.float64)
    total_R = cdf_RV[:, -1]
    token_R = torch.searchsorted(cdf_RV, (uniform_R * total_R)[:, None], right=True)[:, 0]
    # Only logits that are not finite can push the index past the end; the caller sees their NaN log-prob.
    token_R.clamp_(max=scaled_RV.shape[1] - 1)
    logprob_R = scaled_RV.gather(1, token_R[:, None])[:, 0].double() - total_R.log()
    return token_R, logprob_R


def _greedy_rows(shifted_RV: torch.Tensor, temperature: Array, token_R: torch.Tensor, logprob_R: torch.Tensor) -> None:
    rows = np.flatnonzero(temperature == 0.0)
    if rows.size:
        index = _to(rows, shifted_RV)
        token_R[index] = shifted_RV[index].argmax(-1)
        logprob_R[index] = 0.0


def _cut_rows(
    scaled_RV: torch.Tensor,
    uniform_R: torch.Tensor,
    settings: Settings,
    token_R: torch.Tensor,
    logprob_R: torch.Tensor,
) -> None:
    """Rows with top-k or top-p are drawn again among the likeliest tokens: first k, then the nucleus of those."""
    rows = np.flatnonzero(((settings.top_k > 0) | (settings.top_p < 1.0)) & (settings.temperature > 0.0))
    if not rows.size:
        return
    index = _to(rows, scaled_RV)
    sorted_RV, order_RV = scaled_RV[index].sort(stable=True, dim=-1, descending=True)
    vocabulary = sorted_RV.shape[1]
    wanted = np.where(settings.top_k[rows] > 0, settings.top_k[rows], vocabulary)
    rank_V = torch.arange(vocabulary, device=scaled_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= _to(wanted.astype(np.int64), scaled_RV)[:, None], -torch.inf)
    weight_RV = sorted_RV.double().exp()
    before_RV = weight_RV.cumsum(-1) - weight_RV
    nucleus_R = _to(settings.top_p[rows].astype(np.float64), scaled_RV) * weight_RV.sum(-1)
    # The first token is always kept: nothing stands before it and top_p is above 0.
    sorted_RV = sorted_RV.masked_fill(before_RV >= nucleus_R[:, None], -torch.inf)
    picked_R, cut_logprob_R = _invert(sorted_RV, uniform_R[index])
    token_R[index] = order_RV.gather(1, picked_R[:, None])[:, 0]
    logprob_R[index] = cut_logprob_R
