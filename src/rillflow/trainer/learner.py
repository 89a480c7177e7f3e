"""A role's model scores rows and learns from them, for an objective: `Learner` and `Objective`.

The loss of an update is the sum of the objective's `loss` over its micro-batches, divided by the sum of its `count`
over the rows of all ranks. Gradients accumulate as plain sums; the divisor is known after the last rows, and gradients
are scaled by it before they are clipped.

Invariants: the result of an update depends neither on parts and micro-batches nor on ranks, up to float rounding (but
for the balance loss of a mixture's routers, which is computed for each micro-batch);
gradients that are not finite are never applied (the optimizer's promise); an error before the first update of a batch
leaves weights and optimizer as they were. After its first update a batch is always finished: `check` is not called any
more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.config import TrainerConfig
from rillflow.trainer.batches import Databuffer, joined
from rillflow.trainer.metrics import Totals
from rillflow.trainer.packing import MicroBatch, idle, micro_batches
from rillflow.trainer.parallel import Peers
from rillflow.trainer.parallel.context import in_teams
from rillflow.trainer.parallel.sharding import reduce_gradients
from rillflow.trainer.utilisation import Work, peak
from rillflow.weights.models import DTYPES

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.optimizer import Optimizer


Measured = tuple[list[torch.Tensor], list[torch.Tensor]]
Seen = tuple[MicroBatch, torch.Tensor]


class Objective:
    """What a model is trained for. Subclasses override `count` and `loss`, and the other methods if they need to.

    `sums` and `peaks` name the values of `measure`: values that are added up, and values whose maximum is taken. With
    `surveys` the learner first scores all micro-batches of an update without gradient, then trains for the objective
    that `fit` returns.
    """

    sums: tuple[str, ...] = ()
    peaks: tuple[str, ...] = ()
    surveys: bool = False

    def prepare(self, data: Databuffer) -> Databuffer:
        """Add columns that the loss needs and no node makes."""
        return data

    def columns(self, data: Databuffer) -> list[str]:
        """Return the columns over tokens that a micro-batch carries: by default all that nodes made."""
        return [name for name in data.made if name.endswith("_N")]

    def count(self, data: Databuffer) -> float:
        """Return these rows' share of the loss's divisor."""
        raise NotImplementedError

    def fit(self, seen: Sequence[Seen], device: torch.device, peers: Peers) -> tuple[Objective, dict[str, float]]:
        """Return the objective to train for, given every score of an update, and metrics of the fit."""
        return self, {}

    def loss(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> torch.Tensor:
        """Return the sum over the micro-batch's tokens, with gradient."""
        raise NotImplementedError

    def measure(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> Measured:
        """Return the values that `sums` and `peaks` name. Runs without gradient."""
        return [], []

    def later(self, *, again: bool) -> Objective:
        """Return the objective of the updates after a batch's first; `again` if an earlier one had the same rows."""
        return self

    def values(self, sums: dict[str, float], peaks: dict[str, float], tokens: int) -> dict[str, float]:
        """Return metrics from the measurements of all ranks over `tokens` trained tokens."""
        return {}


# ---------------------------------------------------------------- a model that learns


Forward = Callable[[MicroBatch], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


def _no_check() -> None:
    """Never abandon the step."""


class Learner:
    """A model with its forward function and its optimizer, which is None for a model that only scores.

    `forward` returns the scores of a micro-batch's trained tokens; that of a policy returns their entropies too.
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
        self._peers = in_teams(peers, config)
        self._ranks = peers.size
        self._in_order = in_order
        self._device = next(model.parameters()).device
        self._late = config.accumulate == "whole" and self._ranks > 1  # gradients are reduced once an update
        self._unreduced = False  # whether gradients were added up and not reduced
        self._work = Work(model)
        self._busy = 0.0  # seconds since the last metrics
        self._done = 0.0  # operations since then

    # ------------------------------------------------------------ scoring

    @torch.no_grad()
    def infer(self, data: Databuffer, check: Callable[[], None] = _no_check) -> npt.NDArray[np.float32]:
        """Return the score of every trained token, 0 elsewhere, without gradient."""
        score_N = np.zeros(len(data.rows.tokens_N), np.float32)
        started = time.perf_counter()
        scored = [(micro.source_T, self._scores(micro)[0], real) for micro, real in self._micros(data, (), check)]
        for source_T, score_T, real in scored:  # reading a score waits for the device, so this comes last
            if real:
                score_N[source_T] = score_T.float().cpu().numpy()
        self._busy += time.perf_counter() - started
        return score_N

    # ------------------------------------------------------------ learning

    def train(
        self,
        parts: Iterable[Databuffer],
        objective: Objective,
        check: Callable[[], None] = _no_check,
        *,
        order: Sequence[int] = (0,),
    ) -> dict[str, float]:
        """Learn from a batch and return its metrics. With one update, each part is used as soon as `parts` yields it.

        `order` is the seed of the mini-batches: the same on all ranks, another one for each step. `check` is called
        before every micro-batch and before the first update, and not after it.
        """
        tally = _Tally(Totals(objective.sums, objective.peaks, self._device))
        for number, update in enumerate(self._updates(parts, order)):
            wanted = objective.later(again=number >= self._config.updates) if number else objective
            self._update(update, wanted, tally, _no_check if number else check)
        return self._metrics(objective, tally)

    def _updates(self, parts: Iterable[Databuffer], order: Sequence[int]) -> Iterator[Iterable[Databuffer]]:
        """Yield the rows of each update. Mini-batches consist of whole groups. Each epoch draws them again, by the
        groups' places in the batch, so they do not depend on which ranks hold the rows."""
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
        self._reduce(self._unreduced)  # of an update that was abandoned
        self.optimizer.zero()
        summed = torch.zeros(2, dtype=torch.float64, device=self._device)
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
            self._reduce(self._late)
            check()
        except BaseException:
            self.optimizer.zero()
            raise
        started = time.perf_counter()
        count, loss, balance = self._peers.total([count, *summed.tolist()])
        applied = self.optimizer.update(1.0 / max(count, 1.0))
        of_routers = {"router_loss": balance / max(count, 1.0)} if self._config.router_loss else {}
        tally.updates.append({"loss": loss / max(count, 1.0), **applied, **fitted, **of_routers})
        self._busy += time.perf_counter() - started

    @torch.no_grad()
    def _survey(self, parts: Sequence[Databuffer], objective: Objective, check: Callable[[], None]) -> list[Seen]:
        """Score all micro-batches of an update under the current weights, before any gradient."""
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
        """Add the gradients of these rows, micro-batch by micro-batch; return their loss and the balance loss of a
        mixture's routers, not yet divided."""
        started = time.perf_counter()
        summed = torch.zeros(2, dtype=torch.float64, device=self._device)
        of_token = objective.count(data) / max(int(data.rows.mask_N.sum()), 1)
        for micro, real in self._micros(data, objective.columns(data), check):
            score_T, entropy_T = self._scores(micro)
            loss = objective.loss(micro, score_T, entropy_T) if real else 0.0 * score_T.sum()
            balance = self._balance(micro, of_token if real else 0.0)
            self._backward(loss if balance is None else loss + self._config.router_loss * balance)
            self._done += self._work.backward(micro)
            if real:
                summed[0] += loss.detach()
                summed[1] += 0.0 if balance is None else balance.detach()
                with torch.no_grad():
                    without = entropy_T.detach() if entropy_T is not None else None
                    tally.totals.add(objective.measure(micro, score_T.detach(), without))
        self._busy += time.perf_counter() - started
        return summed

    def _metrics(self, objective: Objective, tally: _Tally) -> dict[str, float]:
        """Return means over the updates, the sum of skipped ones and the last learning rate."""
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
            of["mfu"] = done / seconds / self._ranks / peak(self._device, DTYPES[self._config.dtype])
        return of | objective.values(sums, peaks, int(tokens))

    # ------------------------------------------------------------ micro-batches

    def _micros(
        self, data: Databuffer, columns: Sequence[str], check: Callable[[], None]
    ) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield the micro-batches of these rows. Ranks in lockstep run as many as the rank with the most: the others
        add idle ones (False)."""
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
        if config.lockstep and self._ranks > 1:
            most = int(self._peers.highest([len(makers)])[0])
        for make in makers:
            check()
            yield make(), True
        for _ in range(most - len(makers)):
            check()
            yield idle(columns, self._device), False

    def _backward(self, loss: torch.Tensor) -> None:
        if self._late:
            reduce_gradients(self.model, False)
            self._unreduced = True
        loss.backward()  # type: ignore[no-untyped-call]

    def _reduce(self, wanted: bool) -> None:
        """Reduce the gradients that were added up, by an idle pass. All ranks call this together."""
        if wanted:
            reduce_gradients(self.model, True)
            score_T, _ = self._scores(idle((), self._device))
            (0.0 * score_T.sum()).backward()  # type: ignore[no-untyped-call]
            self._unreduced = False

    def _balance(self, micro: MicroBatch, of_token: float) -> torch.Tensor | None:
        """Return the balance loss of the last forward pass, weighted by the micro-batch's share of the divisor."""
        balance: torch.Tensor | None = getattr(self._forward, "balance", None)
        return None if balance is None else balance * (of_token * len(micro.target_T))

    def _scores(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        scores = self._forward(micro)
        self._done += self._work.forward(micro)
        return (scores, None) if isinstance(scores, torch.Tensor) else scores


class _Tally:
    """Sums over the updates of a batch."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals
        self.tokens = 0
        self.updates: list[dict[str, float]] = []
