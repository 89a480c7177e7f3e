"""Keeps the lease of the batch in hand, from the thread that speaks to the dataflow service, while a step computes.

A trainer that hangs must lose its batch in the end: after `MOST_LEASES` times the lease without a sign of life from
the loop, which gives one with every micro-batch, the lease is left to run out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rillflow.errors import LeaseLost, RillflowError
from rillflow.types import Ack, Batch, RenewBatch

log = logging.getLogger(__name__)

RENEWALS_A_LEASE = 4
MOST_LEASES = 10


class Renewal:
    """Of one batch; `run` until it is cancelled. `lost` is why the batch is no longer held, once that is known.

    `lost` is read and `heard` is called from the loop's thread: each is one assignment of one side.
    """

    def __init__(self, renew: Callable[[RenewBatch], Awaitable[Ack]], batch: Batch) -> None:
        self.lost: LeaseLost | None = None
        self._renew = renew
        self._news = RenewBatch(batch=batch.id, attempt=batch.attempt)
        self._seconds = batch.seconds
        self._silent = 0

    def heard(self) -> None:
        """The loop lives."""
        self._silent = 0

    async def run(self) -> None:
        while self.lost is None:
            await asyncio.sleep(self._seconds / RENEWALS_A_LEASE)
            self._silent += 1
            if self._silent <= RENEWALS_A_LEASE * MOST_LEASES:
                await self._renew_once()
            elif self._silent == RENEWALS_A_LEASE * MOST_LEASES + 1:
                log.error(
                    "batch %s has been held for %.0f s, %d times its lease, without a word from the trainer's loop: "
                    "it is not renewed any more and returns to the stream",
                    self._news.batch,
                    self._seconds * MOST_LEASES,
                    MOST_LEASES,
                )

    async def _renew_once(self) -> None:
        try:
            ack = await self._renew(self._news)
            if not ack.accepted:
                raise LeaseLost(f"batch {self._news.batch} is no longer held: {ack.reason}")
        except LeaseLost as error:
            log.warning("batch %s is lost: %s", self._news.batch, error.message)
            self.lost = error
        except RillflowError as error:
            # The service may be restarting, which gives every live lease its full time again.
            log.warning("the lease of batch %s was not renewed: %s", self._news.batch, error)
