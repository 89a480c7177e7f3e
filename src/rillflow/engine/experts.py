"""The experts that a mixture's routers choose: how they are recorded, and how they travel as bytes.

A recorded choice is the numbers of the experts of one token, router after router. Choices travel with the last chunk of
an answer: those of all tokens that the engine has read for it, prompt and answer but the last token. An engine that
does not know the choice of a token writes UNKNOWN.

Axes: N tokens, W numbers of a token (routers times experts for each).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rillflow.errors import CorruptData, EngineError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch import nn

    Choices = npt.NDArray[np.uint16]

UNKNOWN = 0xFFFF
_ROUTER = "TopKRouter"
_HEAD = np.dtype("<u4")  # numbers of a token, before all of them


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model, in the order of its layers: the modules that transformers calls `…TopKRouter`."""
    return [module for module in model.modules() if type(module).__name__.endswith(_ROUTER)]


def pack(choice_NW: Choices) -> bytes:
    return np.asarray(choice_NW.shape[1], _HEAD).tobytes() + choice_NW.astype("<u2").tobytes()


def unpack(data: bytes | memoryview) -> Choices:
    """Return the choices; CorruptData if the bytes are not those of `pack`."""
    width = int(np.frombuffer(data, _HEAD, 1)[0]) if len(data) >= _HEAD.itemsize else 0
    if not width or (len(data) - _HEAD.itemsize) % (2 * width):
        raise CorruptData("recorded experts have a wrong length", "their row is damaged")
    choice_NW: Choices = np.frombuffer(data, "<u2", offset=_HEAD.itemsize).reshape(-1, width)
    return choice_NW


def tail(data: bytes, skip: int) -> bytes:
    """Return packed choices without those of the first `skip` tokens."""
    return pack(unpack(data)[skip:])


class Recorder:
    """Keeps the choices of a model's last forward pass."""

    def __init__(self, model: nn.Module) -> None:
        routers = routers_of(model)
        if not routers:
            raise EngineError(
                f"{type(model).__name__} has no router of experts that can be recorded",
                "remove trainer.replay_routing",
            )
        self._chosen: list[torch.Tensor | None] = [None] * len(routers)
        self.width = sum(int(getattr(router, "top_k", 0)) for router in routers)
        for number, router in enumerate(routers):
            router.register_forward_hook(partial(self._watch, number))

    def _watch(self, number: int, router: nn.Module, inputs: Any, output: Any) -> None:
        self._chosen[number] = output[2]

    def last(self) -> Choices:
        """Return the choices of the last pass, for all its tokens row after row."""
        parts = [chosen_NK.cpu().numpy() for chosen_NK in self._chosen if chosen_NK is not None]
        return np.concatenate(parts, axis=1).astype(np.uint16)
