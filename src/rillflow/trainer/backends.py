"""The trainer backends by name: each builds a `contracts.Trainer` for one policy on one rank.

`rillflow` is our own. In `accelerate`, models are called, differentiated and updated by transformers and accelerate:
rows are padded, attention and logits are the library's own, precision is accelerate's autocast over fp32 weights, and
AdamW is torch's, prepared by accelerate. Graph, losses, metrics, checkpoints and publication are those of every
backend. It is slower than ours and takes more memory. It is a second opinion on the numbers, and runs models that ours
refuses.

To add a backend, write a class with the methods of the contract, or roles of your own for `build_worker`, and add its
line to `BACKENDS`. `tests/unit/trainer/test_trainer_contract.py` holds every backend to the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rillflow.contracts import Trainer
from rillflow.errors import ConfigError
from rillflow.trainer.learner import Learner
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.packing import MicroBatch, runs
from rillflow.trainer.roles import Roles, build_worker, reference_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.config import TrainerConfig
    from rillflow.trainer.parallel import Peers


# ------------------------------------------------------------ accelerate


class LibraryForward:
    """Log-probs and entropies of trained tokens, from the full logits of a padded batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        layout = micro.layout
        device, longest = layout.tokens_P.device, int(layout.length_S.max())
        rows = len(layout.length_S)
        place_P = torch.from_numpy(runs(np.arange(rows) * longest, layout.length_S)).to(device)
        tokens_SL = torch.zeros(rows * longest, dtype=torch.int64, device=device)
        tokens_SL[place_P] = layout.tokens_P
        real_SL = torch.zeros_like(tokens_SL)
        real_SL[place_P] = 1
        logits_SLV = self._model(
            input_ids=tokens_SL.view(rows, longest), attention_mask=real_SL.view(rows, longest), use_cache=False
        ).logits
        logits_TV = logits_SLV.flatten(0, 1)[place_P[micro.select_T]].float()
        log_TV = (logits_TV / micro.columns["temperature_T"][:, None]).log_softmax(-1)
        score_T = log_TV.gather(1, micro.target_T[:, None])[:, 0]
        return score_T, -(log_TV.exp() * log_TV).sum(-1)


class PreparedOptimizer(Optimizer):
    """Updates the fp32 weights themselves, by rules that accelerate has prepared."""

    def __init__(self, model: PreTrainedModel, config: TrainerConfig, peers: Peers, accelerator: Any) -> None:
        super().__init__(model, config.model_copy(update={"dtype": "fp32"}), peers)
        self._rules = [accelerator.prepare_optimizer(rule) for rule in self._rules]


class AccelerateLearner(Learner):
    accelerator: Any

    def _backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)


class AccelerateRoles(Roles):
    """Makes the learners of an actor and of its reference, and refuses critics."""

    def actor(self) -> Learner:
        accelerator = _accelerator(self._config, self._device)
        model = accelerator.prepare_model(self._policy)
        optimizer = PreparedOptimizer(model, self._config, self._peers, accelerator)
        learner = AccelerateLearner(
            "actor", model, LibraryForward(model), optimizer, self._config, self._peers, in_order=self._in_order
        )
        learner.accelerator = accelerator
        return learner

    def reference(self) -> Learner:
        found = reference_model(self._settings, self._policy, self._device)
        model = _accelerator(self._config, self._device).prepare_model(found, evaluation_mode=True)
        return Learner("reference", model, LibraryForward(model), None, self._config, self._peers)

    def critic(self) -> Learner:
        raise ConfigError("backend accelerate has no critics", "set trainer.backend: rillflow for ppo")


def _accelerator(config: TrainerConfig, device: torch.device) -> Any:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise ConfigError("trainer.backend: accelerate needs its package", "pip install accelerate") from error
    return Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if config.dtype == "bf16" else "no")


BACKENDS: dict[str, Callable[..., Trainer]] = {
    "rillflow": build_worker,
    "accelerate": partial(build_worker, roles=AccelerateRoles),
}
