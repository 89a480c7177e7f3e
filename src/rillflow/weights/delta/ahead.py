"""What encodes deltas is compiled at its first use: for half a minute, or for seconds where the machine code was kept.
Who must not wait for that has it done ahead.
"""

from __future__ import annotations

import logging
import threading

import torch

log = logging.getLogger(__name__)


class Ahead:
    """Prepares the encoder for weights of a dtype on a device, in a thread of its own, which ends with the process."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._thread = threading.Thread(target=_prepare, args=(dtype, device), name="prepare-deltas", daemon=True)
        self._thread.start()

    def ready(self) -> bool:
        """Whether that has ended. If it has failed, who encodes hears of it."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """The same, after so long at most."""
        self._thread.join(seconds)
        return self.ready()


def _prepare(dtype: torch.dtype, device: torch.device) -> None:
    from rillflow.weights.delta.file import encode

    try:
        base = torch.ones(4096, dtype=dtype, device=device)
        new = base.clone()
        new[::64] += 1
        new[1::64] *= -3
        encode(base, new)
    except Exception:
        log.warning("the encoder of deltas could not be prepared", exc_info=True)
