"""Compiles the codec of deltas before its first use.

Compiling takes half a minute, or a second where the machine code was kept.
"""

from __future__ import annotations

import logging
import threading

import torch

from rillflow import kernels

log = logging.getLogger(__name__)


class Ahead:
    """Prepares the encoder for weights of a dtype on a device, in a thread of its own; for one who `reads` them, on the
    host, the decoder as well. The process waits for the thread at its end, because a
    daemon thread inside torch would abort it."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, reads: bool = False) -> None:
        self._thread = threading.Thread(target=_prepare, args=(dtype, device, reads), name="deltas")
        self._thread.start()

    def ready(self) -> bool:
        """Return whether it has ended. If it has failed, the next encoding raises its error."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """The same, after so long at most."""
        self._thread.join(seconds)
        return self.ready()


def _prepare(dtype: torch.dtype, device: torch.device, reads: bool) -> None:
    try:
        base = torch.ones(4096, dtype=dtype, device=device)
        new = base.clone()
        new[::64] += 1
        new[1::64] *= -3
        with kernels.one_compiles():
            _use(base, new, reads)
    except Exception:
        log.warning("the codec of deltas could not be prepared", exc_info=True)


def _use(base: torch.Tensor, new: torch.Tensor, reads: bool) -> None:
    from rillflow.kernels.delta import union
    from rillflow.weights.delta.file import decode, encode
    from rillflow.weights.fingerprint import moved

    made = encode(base, new)
    if reads:
        change = decode(base, made.data)
        moved(made.base, base, change)
        assert change.index_K is not None, "few weights have changed"
        union(change.index_K.numpy(), change.index_K.numpy())
