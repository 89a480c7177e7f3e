"""One optimizer step on one batch.

Invariants: the result does not depend on how the batch is split into micro-batches (up to float rounding); a step
that is stopped changes nothing; gradients that are not finite are never applied. Masters and optimizer state are
fp32, whatever the forward pass runs in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rillflow.config import TrainerConfig
from rillflow.errors import CheckpointError
from rillflow.trainer.algorithms import Algorithm
from rillflow.trainer.batches import Rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.metrics import Totals, batch_values, finite
from rillflow.trainer.packing import Plan, collate, input_length, pack
from rillflow.weights.codec import unique
from rillflow.weights.models import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.contracts import Tensors
    from rillflow.trainer.batches import Floats

log = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Stopped(Exception):
    """The step was abandoned between two micro-batches; the weights are as before it."""


def _never() -> bool:
    return False


class Learner:
    """A model, its optimizer and how many steps it has made."""

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: Algorithm,
        config: TrainerConfig,
        *,
        in_order: bool = False,
    ) -> None:
        self.steps = 0
        self._model = model
        self._algorithm = algorithm
        self._config = config
        self._in_order = in_order
        self._forward = PolicyForward(model, DTYPES[config.dtype])
        self._parameters = dict(model.named_parameters())
        self._device = next(iter(self._parameters.values())).device
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    # ------------------------------------------------------------ the step

    def step(self, rows: Rows, stop: Callable[[], bool] = _never) -> dict[str, float]:
        """Train on the batch; returns its metrics. Raises Stopped once `stop()` is true between micro-batches."""
        started = time.perf_counter()
        advantage_R = self._algorithm.advantage(rows)
        values = batch_values(rows, advantage_R)
        values |= self._accumulate(self._filtered(rows), advantage_R, stop)
        values |= self._update()
        values["tokens_per_second"] = values["tokens"] / (time.perf_counter() - started)
        return finite(values)

    def _filtered(self, rows: Rows) -> Rows:
        """The overlong filter: rows whose answer was cut say nothing about its end, so they are not trained."""
        return rows.masked(~rows.truncated_R) if self._config.overlong_filter else rows

    def _accumulate(self, rows: Rows, advantage_R: Floats, stop: Callable[[], bool]) -> dict[str, float]:
        """Gradients of the whole batch, micro-batch by micro-batch."""
        trained_R = rows.trained_R
        totals = Totals(self._algorithm.clip, self._device)
        plan = Plan(rows, input_length(rows), advantage_R, self._algorithm.weigh(trained_R))
        self._optimizer.zero_grad()
        for index_B in pack(plan.input_R, self._config.micro_tokens, in_order=self._in_order):
            if stop():
                self._optimizer.zero_grad()
                raise Stopped
            micro = collate(plan, index_B, self._device)
            new_T, entropy_T = self._forward(micro)
            loss = (self._algorithm.loss(new_T, micro.old_T, micro.advantage_T) * micro.weight_T).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            totals.add(loss.detach(), new_T.detach(), micro, entropy_T)
        return totals.values(int(trained_R.sum()))

    def _update(self) -> dict[str, float]:
        """Apply the gradients at this step's learning rate."""
        lr = self._config.lr * min(1.0, (self.steps + 1) / max(self._config.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm))
        applied = np.isfinite(norm) and any(p.grad is not None for p in self._parameters.values())
        if applied:
            self._optimizer.step()
        else:
            log.warning("step %d changes nothing: no gradient, or none that is finite", self.steps + 1)
        self.steps += 1
        return {"grad_norm": norm, "lr": lr, "skipped": float(not applied)}

    # ------------------------------------------------------------ weights and state

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The current weights as engines load them, tied ones under each of their names; good until the next step."""
        masters, aliases = unique(self._state())
        cast = {name: tensor.to(dtype) for name, tensor in masters.items()}
        return cast | {alias: cast[name] for alias, name in aliases.items()}

    def masters(self) -> dict[str, torch.Tensor]:
        """The exact weights, each tied one once."""
        return unique(self._state())[0]

    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer's state, by `moment/parameter`; empty before the first step."""
        state = self._optimizer.state
        return {
            f"{moment}/{name}": state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in _MOMENTS
            if parameter in state
        }

    @torch.no_grad()
    def restore(self, masters: Tensors, moments: Tensors, steps: int) -> None:
        """Continue exactly from what `masters`, `moments` and `steps` were."""
        own = self.masters()
        if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in masters.items()}:
            raise CheckpointError(
                "the checkpoint is of another model", "resume with the recipe the run was started with"
            )
        for name, tensor in masters.items():
            own[name].copy_(tensor)
        self._optimizer.load_state_dict(self._optimizer_state(moments))
        self.steps = steps

    def _optimizer_state(self, moments: Tensors) -> dict[str, Any]:
        state = {
            number: {moment: moments[f"{moment}/{name}"].clone() for moment in _MOMENTS}
            for number, name in enumerate(self._parameters)
            if f"step/{name}" in moments
        }
        return {"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]}

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self._model.state_dict().items()}
