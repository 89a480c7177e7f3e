"""Low-rank adapters in a server that adds them to its weights: vLLM with `--enable-lora`.

A published adapter goes into the server as a peft folder under a new number, while the server samples with the one
before. The update itself is that requests name the new number. The server's own weights stay those of the base.

Invariants: the server's dtype and `alpha / rank` are in the tensors before the server reads them, so what its layers
hold can be compared bit for bit; a number is never used twice in one server; two adapters are resident at most.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rillflow.engine.servers.weights import Laid, ModelFacts, Tainted, Update, verify, written
from rillflow.errors import ConfigError, EngineError, EngineLost, WeightsError
from rillflow.weights.codec import LORA_A, LORA_B
from rillflow.weights.fingerprint import fingerprint
from rillflow.weights.models import DTYPES, pick_device

if TYPE_CHECKING:
    from rillflow.config import LoraConfig, PolicyConfig
    from rillflow.contracts import Tensors
    from rillflow.weights.codec import Adapter

log = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM has kernels for
SLOTS = 2  # the adapter that is served, and the one that comes next
_STEM = "adapter_model"
_MERGE = "leave engine.server.adapters at auto, or set it to merged"


@dataclass(frozen=True)
class AdapterPlan:
    """The adapters that a server must be able to hold: their highest rank, the layers that have one, and the number of
    policies. `asked` is the setting that asks for them, which is refused if the server cannot; else they are merged."""

    rank: int
    layers: tuple[str, ...]
    asked: str = ""
    policies: int = 1

    @property
    def slots(self) -> int:
        return SLOTS * self.policies

    def arguments(self, *, cpu: bool) -> list[str]:
        """Return the words that start vLLM with adapters. Only layers that have one are wrapped."""
        room = min(rank for rank in RANKS if rank >= self.rank)
        # On a CPU, vLLM computes tokens without an adapter with the last slot, if others of their step have one. It
        # takes the first free slot, so one slot more than are ever used stays empty.
        slots = str(self.slots + cpu)
        leaves = dict.fromkeys(layer.rpartition(".")[2] for layer in self.layers)
        return [
            "--enable-lora",
            *("--max-lora-rank", str(room)),
            *("--max-loras", slots, "--max-cpu-loras", slots),
            *("--lora-target-modules", *leaves),
        ]

    def missing(self, capacity: Mapping[str, Any] | None) -> str:
        """Return why a server of this `capacity` (`rillflow_adapters`) cannot hold the adapters, or an empty string."""
        if capacity is None:
            return "vLLM was started without --enable-lora"
        if capacity["rank"] < self.rank:
            return f"vLLM was started with --max-lora-rank {capacity['rank']}, the adapters have rank {self.rank}"
        if capacity["slots"] < self.slots:
            return f"vLLM was started with --max-loras {capacity['slots']}, updates need {self.slots}"
        absent = sorted(set(self.layers) - set(capacity["layers"]))
        return f"vLLM has no adapters for {', '.join(absent[:4])}" if absent else ""


def plan_adapters(policy: PolicyConfig, model: ModelFacts) -> AdapterPlan | None:
    """Return what a policy's vLLM must hold; None if versions are merged. ConfigError if the policy asks for adapters
    that vLLM cannot add."""
    asked, lora = policy.engine.server.adapters, policy.trainer.lora
    if lora is None or asked == "merged":
        return None
    layers = tuple(
        name
        for name in model.linears
        if lora.targets == "all-linear" or any(_matches(name, target) for target in lora.targets)
    )
    why = _refusal(policy, lora, layers)
    if not why and policy.engine.on_update == "keep":
        why = "a request names its adapter once, so engine.on_update keep needs merged weights"
    if not why and asked == "auto" and _on_cpu(policy):
        why = "vLLM's kernels for CPUs sample several times slower with adapters"
    if not why:
        return AdapterPlan(lora.rank, layers, "" if asked == "auto" else asked)
    if asked != "auto":
        raise ConfigError(f"engine.server.adapters {asked} does not work: {why}", _MERGE)
    log.info("adapters are merged on the node's host: %s", why)
    return None


def joined(plans: Sequence[AdapterPlan]) -> AdapterPlan:
    """Return the plan of a server that policies with these plans share."""
    layers = tuple(dict.fromkeys(layer for plan in plans for layer in plan.layers))
    return AdapterPlan(max(plan.rank for plan in plans), layers, plans[0].asked, len(plans))


def _refusal(policy: PolicyConfig, lora: LoraConfig, layers: tuple[str, ...]) -> str:
    """Return why vLLM cannot add these adapters, as far as that is known before it starts."""
    if lora.rank > RANKS[-1]:
        return f"trainer.lora.rank {lora.rank} is above vLLM's highest, {RANKS[-1]}"
    if policy.engine.dtype == "fp32" and pick_device(policy.engine.device).type == "cuda":
        return "vLLM's kernels for adapters on GPUs need 16 bits, engine.dtype is fp32"
    named = [] if lora.targets == "all-linear" else lora.targets
    unknown = [target for target in named if not any(_matches(layer, target) for layer in layers)]
    if unknown or not layers:
        return f"trainer.lora.targets has {', '.join(unknown) or 'no layers'}: vLLM adds adapters to linear layers"
    return ""


def _on_cpu(policy: PolicyConfig) -> bool:
    """Return whether the server will be started on a CPU. One that runs already was started for adapters, or not."""
    return policy.engine.server.url is None and pick_device(policy.engine.device).type == "cpu"


def _matches(layer: str, target: str) -> bool:
    """Return whether a layer is one that peft finds by this target."""
    return f".{layer}".endswith(f".{target}")


# ------------------------------------------------------------ one adapter


def lay_adapter(adapter: Adapter, model: ModelFacts) -> Laid:
    """Write a peft folder. WeightsError if the adapter does not fit the model."""
    scale, dtype = adapter.alpha / adapter.rank, DTYPES[model.dtype]
    tensors: dict[str, torch.Tensor] = {}
    for name in adapter.weights:
        low, high = adapter.tensors[name + LORA_A], adapter.tensors.get(name + LORA_B)
        if high is None or (len(high), low.shape[1]) != model.shapes.get(model.aliases.get(name, "")):
            raise WeightsError(f"an adapter does not fit {name}", "is it of the same model?")
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{layer}{LORA_A}.weight"] = low.to(dtype).contiguous()
        tensors[f"{layer}{LORA_B}.weight"] = (scale * high.float()).to(dtype).contiguous()
    laid = Laid(*written(tensors, _STEM), "rillflow_adapter", {})
    leaves = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in adapter.weights})
    settings = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.rank, "bias": "none"}
    (laid.folder / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": leaves}))
    if len(laid.files) > 1:
        laid.remove()
        raise WeightsError("the adapter does not fit into one file", _MERGE)
    return laid


class AdapterServer(Protocol):
    """A server that can hold adapters, as an update uses it."""

    async def add_adapter(self, number: int, folder: str, file: str) -> list[str]:
        """Add an adapter beside the one that is served; return the layers that do not hold their part of it."""

    def use_adapter(self, number: int) -> None:
        """Let requests from now on name this adapter, and retire the one before."""

    def retire_adapter(self, number: int) -> None:
        """Remove an adapter once the update has ended."""

    async def rewrite(self, method: str, argument: list[Any]) -> list[Any]:
        """Call a method of all workers."""


class AdapterUpdate(Update):
    """An adapter that is in the server before anything is cut."""

    def __init__(self, server: AdapterServer, laid: Laid, number: int) -> None:
        self._server = server
        self._laid = laid
        self._number = number
        self._added = self._used = False

    async def get_ready(self) -> None:
        if self._added:
            return
        folder, began = self._laid.folder, time.perf_counter()
        try:
            wrong = await self._server.add_adapter(self._number, str(folder), str(folder / f"{_STEM}.safetensors"))
        except EngineLost:
            raise
        except EngineError as error:
            raise WeightsError(f"the server does not take the adapter: {error.message}", "it is merged") from error
        if wrong:
            raise WeightsError(f"the server does not hold the adapter of {', '.join(wrong[:4])}", "it is merged")
        self.seconds = {"add": time.perf_counter() - began}
        self._added = True

    async def apply(self) -> None:
        await self.get_ready()
        self._server.use_adapter(self._number)
        self._used = True

    async def close(self) -> None:
        if not self._used:
            self._server.retire_adapter(self._number)
        await asyncio.to_thread(self._laid.remove)


class BaseUpdate(Update):
    """The base itself, in a server that several policies share: it is compared with what the server holds, and no
    request names an adapter any more. WeightsError for any other weights."""

    def __init__(self, server: AdapterServer, model: ModelFacts, tensors: Tensors) -> None:
        self._server = server
        self._model = model
        self._fingerprints = {name: fingerprint(tensor) for name, tensor in model.whole(tensors).items()}

    async def apply(self) -> None:
        answers = await self._server.rewrite("rillflow_fingerprints", list(self._fingerprints))
        try:
            verify(self._model, self._fingerprints, answers)
        except Tainted as error:
            raise WeightsError(
                f"not the base of a server that several policies share: {error.message}",
                "whole weights of one policy cannot replace it: set engine.server.adapters to auto",
            ) from error
        self._server.use_adapter(0)

    async def close(self) -> None:
        """Do nothing: nothing was prepared."""
