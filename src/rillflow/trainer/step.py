"""One optimizer step on one batch, which may come in parts.

Invariants: the result does not depend on how the batch is split into parts and micro-batches (up to float rounding);
a step that is abandoned changes nothing; gradients that are not finite are never applied. Masters and optimizer state
are fp32, whatever the forward pass runs in.

Gradients accumulate as plain sums; what the batch is divided by is known when its last part is in, and they are scaled
by it before they are clipped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rillflow.config import TrainerConfig
from rillflow.errors import CheckpointError
from rillflow.trainer.algorithms import Algorithm
from rillflow.trainer.algorithms.common import BatchLoss, Loss, WholeRows
from rillflow.trainer.batches import Rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.metrics import RowValues, Totals, finite
from rillflow.trainer.packing import MicroBatch, Plan, collate, input_length, pack
from rillflow.trainer.whole import joined, of_micro, whitened
from rillflow.weights.codec import unique
from rillflow.weights.models import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rillflow.contracts import Tensors

log = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def _go_on() -> None:
    """Nothing abandons the step."""


@dataclass
class _Sums:
    """What adds up over the parts of a batch: `count` is what its loss is divided by. `fitted` is of the whole."""

    rows: RowValues
    tokens: Totals
    count: int = 0
    trained: int = 0
    seconds: float = 0.0
    fitted: dict[str, float] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return 1.0 / max(self.count, 1)

    def values(self) -> dict[str, float]:
        return self.rows.values() | self.tokens.values(self.trained, self.scale) | self.fitted


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

    def step(self, parts: Iterable[Rows], check: Callable[[], None] = _go_on) -> dict[str, float]:
        """Train on a batch, each part as soon as `parts` yields it; returns the metrics of the whole.

        An algorithm that must see the whole batch first waits for its last part. `check` is called before every
        micro-batch and before the update. What it or `parts` raises abandons the step: weights and optimizer are as
        before it.
        """
        sums = _Sums(RowValues(), Totals(self._device))
        self._optimizer.zero_grad()
        try:
            loss, plans = self._prepared(parts, sums, check)
            for plan in plans:
                self._accumulate(plan, loss, sums, check)
            check()
        except BaseException:
            self._optimizer.zero_grad()
            raise
        started = time.perf_counter()
        values = sums.values() | self._update(sums.scale)
        busy = sums.seconds + time.perf_counter() - started
        return finite(values | {"tokens_per_second": values["tokens"] / busy})

    def _prepared(self, parts: Iterable[Rows], sums: _Sums, check: Callable[[], None]) -> tuple[Loss, Iterable[Plan]]:
        """The loss of this batch, and the plans of its parts: as they come, where nothing depends on all of them."""
        plans: Iterable[Plan] = (self._plan(part, sums) for part in parts)
        if self._algorithm.whiten is not None:
            plans = whitened(list(plans), self._algorithm.whiten)
        loss = self._algorithm.loss
        if isinstance(loss, BatchLoss):
            plans = list(plans)
            loss, sums.fitted = loss.fit(self._survey(plans, sums, check))
        return loss, plans

    def _plan(self, part: Rows, sums: _Sums) -> Plan:
        """All that is fixed of a part before the model sees it."""
        advantage_R = self._algorithm.advantage(part)
        sums.rows.add(part, advantage_R)
        rows = self._filtered(part)
        trained_R = rows.trained_R
        sums.trained += int(trained_R.sum())
        sums.count += self._algorithm.aggregation.count(trained_R)
        return Plan(rows, input_length(rows), advantage_R, self._algorithm.aggregation.weigh(trained_R))

    def _filtered(self, rows: Rows) -> Rows:
        """The overlong filter: rows whose answer was cut say nothing about its end, so they are not trained."""
        return rows.masked(~rows.truncated_R) if self._config.overlong_filter else rows

    @torch.no_grad()
    def _survey(self, plans: Iterable[Plan], sums: _Sums, check: Callable[[], None]) -> WholeRows:
        """The whole batch under the weights as they are, before any gradient."""
        started = time.perf_counter()
        seen = [of_micro(micro, self._forward(micro)[0]) for plan in plans for micro in self._micros(plan, check)]
        sums.seconds += time.perf_counter() - started
        return joined(seen, self._device)

    def _micros(self, plan: Plan, check: Callable[[], None]) -> Iterator[MicroBatch]:
        for index_B in pack(plan.input_R, self._config.micro_tokens, in_order=self._in_order):
            check()
            yield collate(plan, index_B, self._device)

    def _accumulate(self, plan: Plan, loss_of: Loss, sums: _Sums, check: Callable[[], None]) -> None:
        """Add the gradients of a part, micro-batch by micro-batch."""
        started = time.perf_counter()
        for micro in self._micros(plan, check):
            new_T, entropy_T = self._forward(micro)
            loss = (loss_of(of_micro(micro, new_T)) * micro.weight_T).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            sums.tokens.add(loss.detach(), loss_of, of_micro(micro, new_T.detach()), entropy_T)
        sums.seconds += time.perf_counter() - started

    def _update(self, scale: float) -> dict[str, float]:
        """Scale the gradients and apply them at this step's learning rate."""
        lr = self._config.lr * min(1.0, (self.steps + 1) / max(self._config.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, scale)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm))
        applied = np.isfinite(norm) and bool(gradients)
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
