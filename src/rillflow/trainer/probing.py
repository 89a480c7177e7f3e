"""The trainer's side of a probe: its own log-probs of the probe's prompts, under the weights that it publishes.

The model computes as it does in a step, with its weights in its own dtype and its LoRA adapters beside the frozen ones:
what publishing rounds (a merged adapter, bf16 copies) is within the tolerance. Sharded, all ranks take part.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np

from rillflow.config import PolicyConfig
from rillflow.trainer.batches import no_rows
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.learner import Learner
from rillflow.types import Probe
from rillflow.weights.probe import prompts, tolerance_of

log = logging.getLogger(__name__)


class Prober:
    """Makes the probe of the weights as they are now."""

    def __init__(self, actor: Learner, settings: PolicyConfig) -> None:
        self._actor = actor
        self._tolerance = tolerance_of(settings)
        config: Any = actor.model.config
        self._prompts = prompts(config.get_text_config().vocab_size, settings.engine.context)
        tokens_RT = np.array(self._prompts, np.int32)
        rows, length = tokens_RT.shape
        self._data = Databuffer(
            replace(
                no_rows(),
                tokens_N=tokens_RT.reshape(-1),
                mask_N=np.tile(np.arange(length) > 0, rows),
                old_N=np.zeros(tokens_RT.size, np.float32),
                temperature_N=np.ones(tokens_RT.size, np.float32),
                start_R=np.arange(rows) * length,
                length_R=np.full(rows, length),
                kept_R=np.zeros(rows, np.int64),
            )
        )

    def __call__(self) -> Probe | None:
        """Collective where the model is sharded; None where the weights give no numbers."""
        score_N = self._actor.infer(self._data)
        if not np.isfinite(score_N).all():
            log.warning("this version has no probe: its log-probs are not finite")
            return None
        rows = score_N.astype(np.float64).reshape(len(self._prompts), -1)[:, 1:].round(6)
        return Probe(prompts=self._prompts, logprobs=rows.tolist(), tolerance=self._tolerance)
