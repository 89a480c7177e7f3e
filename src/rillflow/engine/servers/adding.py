"""Engines whose server adds adapters to the base that it holds, alone or with the engines of other policies.

Invariants: `base` is the version of the server's own weights, and UNKNOWN while they are written; requests name the
adapter of the served version, or none; in a server that several policies share, nothing writes the base, and an engine
cuts only its own answers. Such a server is stopped when its last engine closes, and by the first one that it does not
obey: the others then find it lost, and all meet again in the next one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.config.policy import EngineConfig
from rillflow.contracts import UNKNOWN, Clock
from rillflow.engine.servers.adapters import AdapterPlan, AdapterUpdate, BaseUpdate, lay_adapter
from rillflow.engine.servers.in_place import InPlaceEngine
from rillflow.engine.servers.process import ServerProcess
from rillflow.engine.servers.weights import ModelFacts, Update
from rillflow.errors import ConfigError, EngineError, WeightsError
from rillflow.types import Probe

if TYPE_CHECKING:
    from rillflow.contracts import Deltas, Patch, Tensors
    from rillflow.weights.codec import Adapter

log = logging.getLogger(__name__)


def adapter_numbers() -> Iterator[int]:
    """Return numbers for adapters that vLLM's warm-up and earlier clients of a server have not used."""
    return count(1 + secrets.randbits(30))


class SharedServer:
    """One process for the engines of several policies."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._engines: set[AddingEngine] = set()
        self._process: ServerProcess | None = None
        self._address = ("", "")
        self.numbers = adapter_numbers()

    async def join(self, engine: AddingEngine) -> tuple[str, str]:
        """Return URL and token of the server; the first engine starts it."""
        async with self._lock:
            if self._process is None or not self._process.running:
                try:
                    self._address = await engine.start_server()
                except BaseException:
                    if engine.process is not None:
                        await engine.process.stop()
                    raise
                self._process = engine.process
            engine.process = self._process
            self._engines.add(engine)
            return self._address

    async def leave(self, engine: AddingEngine, *, closing: bool) -> None:
        """Stop the server if the engine was its last, or cannot use it any more."""
        async with self._lock:
            self._engines.discard(engine)
            if self._process is None or engine.process is not self._process or (closing and self._engines):
                return
            process, self._process = self._process, None
            await process.stop()


class AddingEngine(InPlaceEngine):
    """An engine that takes adapters if it has a `plan` for them."""

    def __init__(
        self,
        model: ModelFacts,
        settings: EngineConfig,
        *,
        logs: Path | None = None,
        clock: Clock | None = None,
        adapters: AdapterPlan | None = None,
    ) -> None:
        super().__init__(model, settings, logs=logs, clock=clock)
        self.plan = adapters
        self.shared: SharedServer | None = None
        self.adapter = 0  # the number of the adapter that requests name; 0: none
        self._base = 0
        self._numbers = adapter_numbers()
        self._retired: list[int] = []

    @abstractmethod
    async def start_server(self) -> tuple[str, str]:
        """Start a server and return its URL and token once it is healthy."""

    @abstractmethod
    async def call_adapters(self, what: str, *arguments: Any) -> Any:
        """Have the server carry out `add_adapter`, `drop_adapter` or `rillflow_adapter`."""

    def share(self, server: SharedServer, plan: AdapterPlan) -> None:
        """Use a server together with other engines, before it is started; `plan` is that of all of them."""
        self.shared, self.plan, self._numbers = server, plan, server.numbers

    def begin_with_base(self) -> None:
        """Take note of a server that holds the base and none of this engine's adapters."""
        self._base, self.adapter, self._retired = 0, 0, []

    # ------------------------------------------------------------ what it takes

    @property
    def base(self) -> int:
        return self._base

    @property
    def adapters_refused(self) -> str:
        return "" if self.plan is not None else "its server was not started with adapters"

    @property
    def adapters_only(self) -> bool:
        return self.shared is not None

    def check_room(self, capacities: Sequence[Mapping[str, Any] | None]) -> None:
        """Give up adapters that a rank has no room for."""
        if self.plan is not None:
            lacking = {self.plan.missing(capacity) for capacity in capacities} - {""}
            if lacking:
                self.refuse_adapters(", ".join(sorted(lacking)))

    def refuse_adapters(self, why: str) -> None:
        """Merge adapters from now on. ConfigError if the recipe asks for another way."""
        assert self.plan is not None
        if self.plan.asked:
            raise ConfigError(f"engine.server.adapters {self.plan.asked} does not work: {why}", "set it to auto")
        log.warning("adapters are merged on the node's host: %s", why)
        self.plan = None

    # ------------------------------------------------------------ adapters

    async def apply_adapter(self, adapter: Adapter, base: int, version: int, probe: Probe | None = None) -> None:
        self._check_up()
        self._check_adapter(base)
        update = AdapterUpdate(self, await asyncio.to_thread(lay_adapter, adapter, self.model), next(self._numbers))
        await self._change(update, version, probe, lambda: self._check_adapter(base))

    def _check_adapter(self, base: int) -> None:
        if self.plan is None:
            raise WeightsError(self.adapters_refused, "load the merged weights")
        if base != self._base:
            raise WeightsError(f"the adapter is of version {base}, the server holds {self._base}", "load whole weights")

    async def add_adapter(self, number: int, folder: str, file: str) -> list[str]:
        await self.call_adapters("add_adapter", number, folder)
        answers: list[list[str]] = await self.call_adapters("rillflow_adapter", number, file)
        return list(dict.fromkeys(layer for wrong in answers for layer in wrong))

    def use_adapter(self, number: int) -> None:
        if self.adapter:
            self.retire_adapter(self.adapter)
        self.adapter = number

    def retire_adapter(self, number: int) -> None:
        self._retired.append(number)

    async def _drop_retired(self) -> None:
        """Remove adapters that no request names any more."""
        retired, self._retired = self._retired, []
        for number in retired:
            with suppress(EngineError):
                await self.call_adapters("drop_adapter", number)

    # ------------------------------------------------------------ whole weights

    async def prepare_load(self, tensors: Tensors) -> Update:
        if self.shared is None:
            return await super().prepare_load(tensors)
        return await asyncio.to_thread(BaseUpdate, self, self.model, tensors)

    async def write(self, method: str, argument: list[Any]) -> list[Any]:
        if method != "rillflow_prepare":
            self._base = UNKNOWN
            self.use_adapter(0)
        return await self.rewrite(method, argument)

    async def _change(
        self, update: Update, version: int, probe: Probe | None, check: Callable[[], None] = lambda: None
    ) -> None:
        try:
            await super()._change(update, version, probe, check)
            if not isinstance(update, AdapterUpdate | BaseUpdate):
                self._base = version
        finally:
            await self._drop_retired()

    def _check_base(self, change: Patch | Deltas) -> None:
        super()._check_base(change)
        if self.adapter or self.shared is not None:
            raise WeightsError("differences do not belong to an adapter or a base that is shared", "load whole weights")
