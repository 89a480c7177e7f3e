"""Servers whose weights are changed in place, through `inside.rillflow_weights` in each of their workers."""

from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rillflow.config import EngineConfig
from rillflow.contracts import Clock
from rillflow.engine.servers.base import ServerEngine
from rillflow.engine.servers.process import ServerProcess
from rillflow.engine.servers.weights import (
    DeltaUpdate,
    LaidUpdate,
    ModelFacts,
    Update,
    check_layout,
    lay_changes,
    lay_whole,
    split_tensors,
)
from rillflow.errors import EngineLost, WeightsError
from rillflow.weights.models import load_policy_model

if TYPE_CHECKING:
    from rillflow.contracts import Deltas, Patch, Tensors
    from rillflow.types import Probe


_LOOK_SECONDS = 0.25  # between two looks at a server that starts


class InPlaceEngine(ServerEngine):
    """An engine whose adapter, for the server `PRODUCT`, only has to call a method of all workers.

    `process` is the server's process if it was started here.
    """

    PRODUCT: ClassVar[str]
    DECODES_AHEAD: ClassVar[bool] = False  # whether its workers can decode a delta while they sample

    def __init__(
        self, model: ModelFacts, settings: EngineConfig, *, logs: Path | None = None, clock: Clock | None = None
    ) -> None:
        super().__init__(model, settings, clock=clock)
        self.process: ServerProcess | None = None
        self._logs = logs
        self._start_id = secrets.token_hex(8)
        self._probes = count()
        self._refused = "engine.server.decodes_deltas is false" if settings.server.decodes_deltas is False else ""

    def salt(self, version: int) -> str:
        """Return the key of the server's prefix cache. It differs for every start, because a server that runs already
        may have served other weights under the same version."""
        return f"{self._start_id}-{version}"

    def probe_salt(self, version: int) -> str:
        """Return a new key for each probe: a version that failed and is loaded again must not find its old entries."""
        return f"{self.salt(version)}-probe-{next(self._probes)}"

    async def launch(self, process: ServerProcess) -> None:
        self.process = process
        try:
            await process.start()
        except OSError as error:
            raise EngineLost(
                f"{self.settings.server.python} cannot be started: {error}",
                f"engine.server.python is the interpreter of the environment that has {self.PRODUCT}",
            ) from error

    async def wait_until(self, serves: Callable[[], Awaitable[bool]]) -> None:
        """EngineLost when the server ends before, or takes longer than `server.start_timeout`."""
        seconds = self.settings.server.start_timeout
        try:
            async with asyncio.timeout(seconds):
                while not await serves():
                    if self.process is not None and not self.process.running:
                        cause = self.process.cause()
                        why = f": {cause}" if cause else ""
                        raise EngineLost(f"{self.PRODUCT} ended before it served{why}", self._words())
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise EngineLost(f"{self.PRODUCT} does not serve after {seconds:g} s", self._words()) from None

    def _words(self) -> str:
        return f"its last words:\n{self.process.tail()}" if self.process is not None else "is it running?"

    @abstractmethod
    async def rewrite(self, method: str, argument: list[Any]) -> list[Any]:
        """Call a method of `rillflow_weights` that takes a list, on every rank; return what each answers."""

    async def write(self, method: str, argument: list[Any]) -> list[Any]:
        """Call a method that changes the server's weights."""
        return await self.rewrite(method, argument)

    def learn_layout(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Take what every rank says of where weights live. ConfigError when they cannot be changed in place."""
        check_layout(self.model, answers)
        split = split_tensors(self.model, answers)
        if split and not self._refused:
            self._refused = f"its ranks hold parts of {len(split)} tensors, and a delta is decoded from whole ones"
        on_host = all(answer["devices"] == ["cpu"] for answer in answers)
        if on_host and self.settings.server.decodes_deltas is None and not self._refused:
            self._refused = "its weights are on the host too, where the node's decoder is faster"

    @property
    def decoding_refused(self) -> str:
        return self._refused

    async def prepare_load(self, tensors: Tensors) -> Update:
        laid = await asyncio.to_thread(lay_whole, self.model.whole(tensors))
        return LaidUpdate(self.model, laid, self.write)

    async def prepare_patch(self, patch: Patch) -> Update:
        changes = self.model.changes(patch)
        aliases = self.model.aliases
        known = {aliases[name]: value for name, value in patch.fingerprints.items() if aliases.get(name) in changes}
        if set(known) != set(changes):
            raise WeightsError("a patch without fingerprints of all it changes", "load the whole weights")
        laid = await asyncio.to_thread(lay_changes, changes, known)
        return LaidUpdate(self.model, laid, self.write)

    async def apply_deltas(self, deltas: Deltas, version: int, probe: Probe | None = None) -> None:
        self._check_up()
        self._check_base(deltas)
        ahead = self.DECODES_AHEAD
        update = await asyncio.to_thread(DeltaUpdate, self.model, deltas, self.write, ahead=ahead)
        await self._change(update, version, probe, lambda: self._check_base(deltas))

    async def put_initial(self) -> None:
        """Version 0 into a server that runs already, whatever it served before."""
        folder, dtype = str(self.model.folder), self.model.dtype
        model = await asyncio.to_thread(load_policy_model, folder, dtype, torch.device("cpu"))
        update = await self.prepare_load(model.state_dict())
        try:
            await update.apply()
        finally:
            await update.close()
