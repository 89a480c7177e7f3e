"""Probes: a version carries its trainer's log-probs of a few prompts, and an engine must reproduce them to serve it.

Fingerprints prove that the right bytes are in memory. A probe proves that the engine computes with them: the tensors
are in the right places, everything that the engine derives from them is new too, and the model is the same.

Invariants: all versions of a policy have the same prompts, so an engine that still computes with an earlier version
reproduces that version's probe; the verdict depends on the mean over all tokens, so one token that rounding moves far
(a router that chooses another expert) does not fail it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from rillflow.errors import WeightsError
from rillflow.types import Probe

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.config import PolicyConfig

    Floats = npt.NDArray[np.float64]

Scores = Sequence[Sequence[float]]
Cause = Literal["numerics", "stale weights", "wrong weights", "cut distribution"]

PROMPTS, TOKENS = 4, 32
# The tolerated mean distance of log-probs, as a share of the spread of the trainer's. Rounding moves logits in
# proportion to their size, and the spread grows with it, so one number serves small and large models. In fp32 up to
# 3e-6 was measured on a CPU; the rest is room for GPUs that multiply in TF32. bf16 keeps 8 bits: vLLM and the trainer
# were 0.04 nats apart on an H200 (SmolLM2-135M, sampled tokens). The tolerances of bf16 and of quantised caches or
# models are generous, because a false alarm stops a run.
FP32, BF16, QUANTISED = 0.01, 0.1, 0.4
_QUANTISED = ("quantization", "kv-cache-dtype")  # in arguments of vLLM's and SGLang's command lines
_LEAST_SPREAD = 0.1  # nats: a model that finds all tokens alike still rounds
_A_LITTLE = 4.0  # times the tolerance: the distance between different kernels
_ALIKE, _SLOPE = 0.95, 0.1  # logits were scaled if they correlate this well with a slope this far from 1


def prompts(vocabulary: int, context: int) -> list[list[int]]:
    """Return the prompts of a policy's probes: random ids from a fixed seed.

    Ids come from the vocabulary's second to fourth eighth: special tokens, placeholders of images and padding of the
    embedding are at its ends. A prompt leaves room for the one token that servers sample after it.
    """
    length = max(2, min(TOKENS, context - 1))
    drawn = np.random.default_rng(0).integers(vocabulary // 8, max(vocabulary // 2, 2), (PROMPTS, length))
    return [[int(token) for token in row] for row in drawn]


def tolerance_of(settings: PolicyConfig) -> float:
    """Return the tolerance of a policy's probes: the recipe's, else that of the coarsest number format involved."""
    if isinstance(settings.weights.probe, float):
        return settings.weights.probe
    if any(word in argument for argument in settings.engine.server.arguments for word in _QUANTISED):
        return QUANTISED
    return BF16 if "bf16" in (settings.trainer.dtype, settings.engine.dtype) else FP32


class ProbeMismatch(WeightsError):
    """An engine does not reproduce a version's probe, so it must not serve it."""

    def __init__(self, version: int, probe: Probe, scores: Scores, earlier: Mapping[int, Probe] | None = None) -> None:
        self.version, self.probe, self.scores = version, probe, scores
        found = diagnose(probe, scores, earlier or {})
        self.cause = found.cause
        super().__init__(f"version {version} is not served, {found.cause}: {found.why}", found.hint)


def check(version: int, probe: Probe, scores: Scores) -> None:
    """Raise ProbeMismatch if an engine's log-probs of the probe's tokens are not those of `version`."""
    if not _reproduced(probe, scores):
        raise ProbeMismatch(version, probe, scores)


class Diagnosis(NamedTuple):
    cause: Cause
    why: str
    hint: str


def diagnose(probe: Probe, scores: Scores, earlier: Mapping[int, Probe]) -> Diagnosis:
    """Return the likeliest cause of a mismatch. `earlier` are the probes of versions that the engine may still hold."""
    want_T, got_T = _flat(probe.logprobs), _flat(scores)
    if want_T.shape != got_T.shape or np.isnan(got_T).any():
        return Diagnosis("wrong weights", "its log-probs are not numbers, or not one for each token", _WRONG)
    for version, other in sorted(earlier.items(), reverse=True):
        if other.prompts == probe.prompts and _reproduced(other, scores):
            return Diagnosis("stale weights", f"the engine still computes with version {version}", _STALE)
    if np.isinf(got_T).any():
        return Diagnosis("cut distribution", "the engine gives some tokens no probability at all", _CUT)
    scale = _slope(want_T, got_T)
    if abs(scale - 1.0) > _SLOPE:
        return Diagnosis("cut distribution", f"its log-probs look like those at temperature {1 / scale:.2g}", _CUT)
    apart, far = distance(probe, scores), float(np.abs(got_T - want_T).mean())
    why = (
        f"its log-probs of the probe are {far:.2g} nats from the trainer's, {apart:.2g} of their spread "
        f"(tolerance {probe.tolerance:g})"
    )
    if apart <= _A_LITTLE * probe.tolerance:
        return Diagnosis("numerics", why, _NUMERICS)
    return Diagnosis("wrong weights", why, _WRONG)


_NUMERICS = (
    "trainer and engine compute a little differently: compare engine.dtype with trainer.dtype and look for a quantised "
    "cache; if the difference is wanted, set weights.probe to a larger tolerance"
)
_STALE = (
    "the update (of a LoRA policy, its adapter) did not reach what the engine computes with; restart the engine, and "
    "report the model if it happens again"
)
_CUT = "remove temperature, top_p, top_k and a generation config from the server's arguments"
_WRONG = (
    "tensors are missing, outdated, in each other's places or of another model: compare policies.*.model with what the "
    "server was started with, then restart the engine"
)


def distance(probe: Probe, scores: Scores) -> float:
    """Return the mean distance of an engine's log-probs from the probe's, as a share of the spread of the probe's.

    If a log-prob is missing or not finite, the distance exceeds every tolerance.
    """
    want_T, got_T = _flat(probe.logprobs), _flat(scores)
    if want_T.shape != got_T.shape:
        return np.inf
    return float(np.abs(got_T - want_T).mean() / max(float(want_T.std()), _LEAST_SPREAD))


def _reproduced(probe: Probe, scores: Scores) -> bool:
    return distance(probe, scores) <= probe.tolerance


def _slope(want_T: Floats, got_T: Floats) -> float:
    """Return the slope of the engine's log-probs over the trainer's; 1 if they are not on a line."""
    if min(want_T.std(), got_T.std()) == 0.0 or np.corrcoef(want_T, got_T)[0, 1] < _ALIKE:
        return 1.0
    return float(np.polyfit(want_T, got_T, 1)[0])


def _flat(rows: Scores) -> Floats:
    return np.array([value for row in rows for value in row], dtype=np.float64)
