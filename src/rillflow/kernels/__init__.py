"""Every compiled fast path, each beside a plain reference in numpy or torch that a test compares it with.

| kernel | result |
|---|---|
| `decode` | attention of a decode step of the embedded engine, on a CPU with one thread |
| `delta` | the coding of weight deltas and their fingerprints, on a CPU |
| `delta_gpu` | the same on a GPU |
| `layers` | norms, gates and rotary embeddings in training, on a CPU |

Rules: a kernel uses the public interfaces of numba, Triton and torch only. Its docstring says what it gains end to end;
one that gains less than a tenth is removed. `RILLFLOW_KERNELS` in the environment of a process is `on` (the default),
`off`, or the names of the kernels to use: `RILLFLOW_KERNELS=delta,layers`. Torch or numpy computes the same if a
kernel is off.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

from rillflow.errors import ConfigError

VARIABLE = "RILLFLOW_KERNELS"
NAMES = ("decode", "delta", "delta_gpu", "layers")


def enabled(name: str) -> bool:
    """Return whether a kernel is to be used, as `RILLFLOW_KERNELS` says."""
    assert name in NAMES, name
    value = os.environ.get(VARIABLE, "on")
    if value in {"on", "off"}:
        return value == "on"
    chosen = value.split(",")
    unknown = sorted(set(chosen) - set(NAMES))
    if unknown:
        raise ConfigError(f"{VARIABLE} names no kernel {unknown[0]!r}", f"it is on, off or some of {', '.join(NAMES)}")
    return name in chosen


def one_compiles() -> AbstractContextManager[None]:
    """Hold a lock of this machine in which a process compiles kernels by using them: `compile.one_compiles`."""
    if os.environ.get(VARIABLE) == "off":
        return nullcontext()
    from rillflow.kernels import compile

    return compile.one_compiles()
