"""A role's model at work: it scores rows, and learns from them.

Invariants: the result of an update depends neither on parts and micro-batches nor on ranks (up to float rounding);
gradients that are not finite are never applied (the optimizer's promise); what is raised before the first update of a
batch leaves weights and optimizer as they were. After its first update a batch is finished whatever happens: nobody is
asked any more whether it is still worth its time.

Gradients accumulate as plain sums; what an update is divided by is known when its last rows are in, and they are scaled
by it before they are clipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.config import TrainerConfig
from rillflow.trainer.graph.databuffer import Databuffer, joined
from rillflow.trainer.layout import MicroBatch
from rillflow.trainer.metrics import Totals
from rillflow.trainer.objective import Objective, Seen
from rillflow.trainer.packing import idle, micro_batches
from rillflow.trainer.parallel.peers import Peers
from rillflow.trainer.utilisation import Work, peak
from rillflow.weights.models import DTYPES

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.optimizer import Optimizer

Forward = Callable[[MicroBatch], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


def _go_on() -> None:
    """Nothing abandons the step."""


class Learner:
    """A model, how it is run, and its optimizer: None for a model that only scores.

    `forward` gives the scores of a micro-batch's trained tokens, a policy's also their entropies.
    """

    def __init__(  # noqa: PLR0917 all of a role, in the order it is made
        self,
        role: str,
        model: torch.nn.Module,
        forward: Forward,
        optimizer: Optimizer | None,
        config: TrainerConfig,
        peers: Peers,
        *,
        in_order: bool = False,
    ) -> None:
        self.role = role
        self.model = model
        self.optimizer = optimizer
        self._forward = forward
        self._config = config
        self._peers = peers
        self._in_order = in_order
        self._device = next(model.parameters()).device
        self._work = Work(model)
        self._busy = 0.0  # seconds since the last metrics
        self._done = 0.0  # operations since then

    # ------------------------------------------------------------ scoring

    @torch.no_grad()
    def infer(self, data: Databuffer, check: Callable[[], None] = _go_on) -> npt.NDArray[np.float32]:
        """The score of every trained token, 0 elsewhere."""
        score_N = np.zeros(len(data.rows.tokens_N), np.float32)
        started = time.perf_counter()
        scored = [(micro.source_T, self._scores(micro)[0], real) for micro, real in self._micros(data, (), check)]
        for source_T, score_T, real in scored:  # only now: to read one waits for all that the device has still to do
            if real:
                score_N[source_T] = score_T.float().cpu().numpy()
        self._busy += time.perf_counter() - started
        return score_N

    # ------------------------------------------------------------ learning

    def train(
        self,
        parts: Iterable[Databuffer],
        objective: Objective,
        check: Callable[[], None] = _go_on,
        *,
        order: Sequence[int] = (0,),
    ) -> dict[str, float]:
        """Learn from a batch, each part as soon as `parts` yields it, where it is one update; returns its metrics.

        `order` is the seed by which mini-batches are drawn: the same on all ranks, another one for each step.
        `check` is called before every micro-batch and before the first update, and not after it.
        """
        tally = _Tally(Totals(objective.sums, objective.peaks, self._device))
        for number, update in enumerate(self._updates(parts, order)):
            wanted = objective.later(again=number >= self._config.updates) if number else objective
            self._update(update, wanted, tally, _go_on if number else check)
        return self._metrics(objective, tally)

    def _updates(self, parts: Iterable[Databuffer], order: Sequence[int]) -> Iterator[Iterable[Databuffer]]:
        """The rows of each update. Mini-batches are of whole groups, drawn anew in each epoch by the groups' places in
        the batch, so that they are the same whichever ranks hold their rows."""
        config = self._config
        if config.updates * config.epochs == 1:
            yield parts
            return
        whole = joined(list(parts))
        place_R = np.minimum(whole["member_R"], config.batch_groups - 1)
        for epoch in range(config.epochs):
            drawn_G = np.random.default_rng((*order, epoch)).permutation(config.batch_groups)
            mini_R = drawn_G[place_R] * config.updates // config.batch_groups
            for mini in range(config.updates):
                yield [whole.taking(np.flatnonzero(mini_R == mini))]

    def _update(
        self, parts: Iterable[Databuffer], objective: Objective, tally: _Tally, check: Callable[[], None]
    ) -> None:
        assert self.optimizer is not None, f"the {self.role} has no optimizer"
        self.optimizer.zero()
        summed = torch.zeros((), dtype=torch.float64, device=self._device)
        count = 0.0
        fitted: dict[str, float] = {}
        prepared: Iterable[Databuffer] = (objective.prepare(part) for part in parts)
        try:
            if objective.surveys:
                prepared = list(prepared)
                objective, fitted = objective.fit(self._survey(prepared, objective, check), self._device, self._peers)
            for data in prepared:
                count += objective.count(data)
                tally.tokens += int(data.rows.mask_N.sum())
                summed += self._accumulate(data, objective, tally, check)
            check()
        except BaseException:
            self.optimizer.zero()
            raise
        started = time.perf_counter()
        count, loss = self._peers.total([count, float(summed)])
        applied = self.optimizer.update(1.0 / max(count, 1.0))
        tally.updates.append({"loss": loss / max(count, 1.0), **applied, **fitted})
        self._busy += time.perf_counter() - started

    @torch.no_grad()
    def _survey(self, parts: Sequence[Databuffer], objective: Objective, check: Callable[[], None]) -> list[Seen]:
        """All scores of an update under the weights as they are, before any gradient."""
        started = time.perf_counter()
        seen = [
            (micro, self._scores(micro)[0], real)
            for data in parts
            for micro, real in self._micros(data, objective.columns(data), check)
        ]
        self._busy += time.perf_counter() - started
        return [(micro, score_T) for micro, score_T, real in seen if real]

    def _accumulate(
        self, data: Databuffer, objective: Objective, tally: _Tally, check: Callable[[], None]
    ) -> torch.Tensor:
        """Add the gradients of these rows, micro-batch by micro-batch; their loss, not yet divided."""
        started = time.perf_counter()
        summed = torch.zeros((), dtype=torch.float64, device=self._device)
        for micro, real in self._micros(data, objective.columns(data), check):
            score_T, entropy_T = self._scores(micro)
            loss = objective.loss(micro, score_T, entropy_T) if real else 0.0 * score_T.sum()
            loss.backward()  # type: ignore[no-untyped-call]
            self._done += self._work.backward(micro)
            if real:
                summed += loss.detach()
                with torch.no_grad():
                    without = entropy_T.detach() if entropy_T is not None else None
                    tally.totals.add(objective.measure(micro, score_T.detach(), without))
        self._busy += time.perf_counter() - started
        return summed

    def _metrics(self, objective: Objective, tally: _Tally) -> dict[str, float]:
        """Means over the updates, but for what was skipped, which adds up, and the last learning rate."""
        updates = tally.updates
        names = sorted({name for update in updates for name in update})
        of = {name: float(np.mean([update[name] for update in updates if name in update])) for name in names}
        of |= {"lr": updates[-1]["lr"], "skipped": sum(update["skipped"] for update in updates)}
        sums, peaks = tally.totals.values(self._peers)
        tokens, done = self._peers.total([tally.tokens, self._done])
        (seconds,) = self._peers.highest([self._busy])
        self._busy = self._done = 0.0
        trained = tokens / self._config.epochs
        of |= {"trained_tokens": trained, "updates": float(len(updates)), "train_seconds": seconds}
        if seconds > 0:
            of["mfu"] = done / seconds / self._peers.size / peak(self._device, DTYPES[self._config.dtype])
        return of | objective.values(sums, peaks, int(tokens))

    # ------------------------------------------------------------ micro-batches

    def _micros(
        self, data: Databuffer, columns: Sequence[str], check: Callable[[], None]
    ) -> Iterator[tuple[MicroBatch, bool]]:
        """The micro-batches of these rows; where the model is sharded, all ranks run as many as the one with the most,
        idle ones (False) to fill up."""
        config = self._config
        makers = micro_batches(
            data,
            columns,
            config.micro_tokens,
            device=self._device,
            trees=config.trees,
            in_order=self._in_order,
            on=self.role == "reward",
        )
        most = len(makers)
        if config.sharding == "fsdp" and self._peers.size > 1:
            most = int(self._peers.highest([len(makers)])[0])
        for make in makers:
            check()
            yield make(), True
        for _ in range(most - len(makers)):
            check()
            yield idle(columns, self._device), False

    def _scores(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        scores = self._forward(micro)
        self._done += self._work.forward(micro)
        return (scores, None) if isinstance(scores, torch.Tensor) else scores


class _Tally:
    """What adds up over the updates of a batch."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals
        self.tokens = 0
        self.updates: list[dict[str, float]] = []
