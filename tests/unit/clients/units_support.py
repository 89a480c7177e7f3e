"""Storage units on free ports, and what a client needs to find them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from rillflow.clients.payloads import PayloadReader
from rillflow.clients.units import UnitWriter
from rillflow.dataflow.storage_unit import FileUnit, ServedUnit, UnitService
from rillflow.types import COLUMNS, UnitBeat, UnitBeatReply, UnitInfo, Units

TOKEN = "secret"


class Few:
    """Some units of a run. `listed` is what the dataflow service would tell; tests change it."""

    def __init__(self, units: Sequence[ServedUnit]) -> None:
        self.units = units
        self.services = [UnitService(unit, TOKEN, self._beat) for unit in units]
        self.listed: list[UnitInfo] = []
        self.asked = 0

    async def _beat(self, beat: UnitBeat) -> UnitBeatReply:
        return UnitBeatReply(drop=[])

    async def tell(self) -> Units:
        self.asked += 1
        return Units(units=self.listed)

    async def start(self) -> None:
        for service in self.services:
            await service.start()
        self.listed = [await service.info() for service in self.services]

    def change(self, n: int, **changes: object) -> None:
        self.listed[n] = msgspec.structs.replace(self.listed[n], **changes)

    def elsewhere(self, nowhere: Path) -> None:
        """As if all of them were on another host: their folders are not here."""
        self.listed = [msgspec.structs.replace(info, path=str(nowhere)) for info in self.listed]

    def reader(self, **options: object) -> PayloadReader:
        return PayloadReader(self.tell, TOKEN, **options)  # type: ignore[arg-type]

    def writer(self, **options: object) -> UnitWriter:
        return UnitWriter(self.tell, TOKEN, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def few_units(folder: Path, count: int = 1, **options: int) -> AsyncIterator[Few]:
    found = Few([FileUnit(folder / str(n), str(n), **options) for n in range(count)])
    await found.start()
    try:
        yield found
    finally:
        for service, unit in zip(found.services, found.units, strict=True):
            await service.stop()
            unit.close()


def row(n: int) -> dict[str, bytes]:
    """Every column that has a value for each token."""
    texts = ("transcript", "answer")
    return {name: np.arange(n).astype(dtype).tobytes() for name, dtype in COLUMNS.items() if name not in texts}
