"""Servers whose weights are changed in place, through `inside.rillflow_weights` in each of their workers."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from rillflow.engine.servers.base import ServerEngine
from rillflow.engine.servers.updates import LaidUpdate, Update, lay_changes, lay_whole
from rillflow.errors import WeightsError
from rillflow.weights.models import load_policy_model

if TYPE_CHECKING:
    from rillflow.contracts import Patch, Tensors


class InPlaceEngine(ServerEngine):
    """What is left for an adapter is to have all workers carry out a method."""

    @abstractmethod
    async def rewrite(self, method: str, paths: list[str]) -> list[Any]:
        """`rillflow_load` or `rillflow_patch` with these files, on every rank; what each of them holds then."""

    async def prepare_load(self, tensors: Tensors) -> Update:
        laid = await asyncio.to_thread(lay_whole, self.model.whole(tensors))
        return LaidUpdate(self.model, laid, self.rewrite)

    async def prepare_patch(self, patch: Patch) -> Update:
        changes = self.model.changes(patch)
        aliases = self.model.aliases
        known = {aliases[name]: value for name, value in patch.fingerprints.items() if aliases.get(name) in changes}
        if set(known) != set(changes):
            raise WeightsError("a patch without fingerprints of all it changes", "load the whole weights")
        laid = await asyncio.to_thread(lay_changes, changes, known)
        return LaidUpdate(self.model, laid, self.rewrite)

    async def put_initial(self) -> None:
        """Version 0 into a server that runs already, whatever it served before."""
        folder, dtype = str(self.model.folder), self.model.dtype
        model = await asyncio.to_thread(load_policy_model, folder, dtype, torch.device("cpu"))
        update = await self.prepare_load(model.state_dict())
        try:
            await update.apply()
        finally:
            await update.close()
