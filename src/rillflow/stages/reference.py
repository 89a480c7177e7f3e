"""Log-probs of the reference model, for the KL term of the trainer.

The model is the one that the trainer would run itself (`trainer.kl.reference`, or the policy's initial weights), by the
same code and at the same temperatures, so the numbers are the same up to the rounding of differently packed rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rillflow.config import Recipe
from rillflow.trainer.batches import REFERENCE, Databuffer
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.learner import Learner
from rillflow.trainer.parallel.peers import Alone
from rillflow.weights.models import load_policy_model, pick_device

if TYPE_CHECKING:
    from rillflow.trainer.batches import Column


class ReferenceLogprobs:
    def __init__(self, recipe: Recipe, policy: str) -> None:
        settings = recipe.policies[policy]
        config = settings.trainer.model_copy(update={"sharding": "none"})
        folder = config.kl.reference if config.kl is not None else None
        model = load_policy_model(folder or settings.model, config.dtype, pick_device(config.device))
        self._learner = Learner(
            "reference",
            model.requires_grad_(False),
            PolicyForward(model, config),
            None,
            config,
            Alone(),
            in_order=recipe.runtime.deterministic,
        )

    def columns(self, data: Databuffer) -> Mapping[str, Column]:
        return {REFERENCE: self._learner.infer(data)}
