"""Deltas of weights: how small they are and how fast they are made and applied, beside the formats of others.

The updates are AdamW's on fp32 masters, with copies in bf16, as a trainer publishes them; the gradients are noise with
a steady part. What is measured is the last of some steps. Every format gives the new weights back, bit for bit
(checked), before it is measured.

* bound: the entropy of positions and changes when each exponent of the old weight has its own ideal code, codes free.
* astraflow: flat index as u32 and the new weight.
* slime: flat index as u32 and the xor of old and new, each through zstd at level 1.
* pulse: in order of rows and columns, the steps between rows as u8 and between columns as u16 and the new weight, each
  through zstd at level 1.

Bytes are per changed weight and count everything, headers and hashes too (the peers here have none). Speed is in GB of
model a second on one thread, ours with all of its verification, against a plain comparison of old and new and a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bench.common import Report, interleave, parser
from rillflow.weights.delta import apply, bound, encode

Array = npt.NDArray[Any]
RATES = (1e-6, 3e-6, 5e-6)
STEPS = 5
NEAR_BOUND, SPEED = 1 / 1.10, 0.5


class Peer(NamedTuple):
    """A format: matrices of old and new bits to bytes, and the old bits and those bytes to the new bits."""

    encode: Callable[[Array, Array], list[bytes]]
    apply: Callable[[Array, list[bytes]], Array]
    compressed: bool


def update(shape: tuple[int, int], rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before and after the last step, in bf16."""
    source = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(0.02 * torch.randn(shape, generator=source))
    optimizer = torch.optim.AdamW([master], lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    steady = 0.3 * torch.randn(shape, generator=source)
    for _ in range(STEPS):
        old = master.detach().bfloat16()
        master.grad = steady + torch.randn(shape, generator=source)
        optimizer.step()
    return old, master.detach().bfloat16()


# ------------------------------------------------------------ the formats of others


def codec() -> Any | None:
    """zstd at level 1, if it is there."""
    try:
        import pyarrow
    except ImportError:
        return None
    return pyarrow.Codec("zstd", compression_level=1)


def _squeezed(array: Array) -> bytes:
    """The size goes first, as in a frame."""
    found = codec()
    assert found is not None
    return array.nbytes.to_bytes(4, "little") + bytes(found.compress(array.tobytes(), asbytes=True))


def _spread(data: bytes, dtype: type) -> Array:
    found = codec()
    assert found is not None
    size = int.from_bytes(data[:4], "little")
    return np.frombuffer(found.decompress(data[4:], size, asbytes=True), dtype)


def astraflow_encode(old: Array, new: Array) -> list[bytes]:
    at = np.flatnonzero(old != new)
    return [at.astype(np.uint32).tobytes(), new.reshape(-1)[at].tobytes()]


def astraflow_apply(old: Array, parts: list[bytes]) -> Array:
    new = old.copy()
    new.reshape(-1)[np.frombuffer(parts[0], np.uint32)] = np.frombuffer(parts[1], np.uint16)
    return new


def slime_encode(old: Array, new: Array) -> list[bytes]:
    at = np.flatnonzero(old != new)
    return [_squeezed(at.astype(np.uint32)), _squeezed(old.reshape(-1)[at] ^ new.reshape(-1)[at])]


def slime_apply(old: Array, parts: list[bytes]) -> Array:
    new = old.copy()
    new.reshape(-1)[_spread(parts[0], np.uint32)] ^= _spread(parts[1], np.uint16)
    return new


def pulse_encode(old: Array, new: Array) -> list[bytes]:
    """Rows without a change for more than 255 rows do not occur here; the format has another way for them."""
    rows, columns = np.nonzero(old != new)
    down = np.diff(rows, prepend=0)
    along = np.where(down == 0, np.diff(columns, prepend=0), columns)
    assert down.max(initial=0) < 1 << 8
    assert along.max(initial=0) < 1 << 16
    return [_squeezed(down.astype(np.uint8)), _squeezed(along.astype(np.uint16)), _squeezed(new[rows, columns])]


def pulse_apply(old: Array, parts: list[bytes]) -> Array:
    down, along = _spread(parts[0], np.uint8).astype(np.int64), _spread(parts[1], np.uint16).astype(np.int64)
    sums = np.cumsum(along)
    firsts = np.flatnonzero(down)
    before = np.zeros(len(along), np.int64)
    before[firsts] = np.diff(sums[firsts] - along[firsts], prepend=0)
    new = old.copy()
    new[np.cumsum(down), sums - np.cumsum(before)] = _spread(parts[2], np.uint16)
    return new


PEERS = {
    "astraflow": Peer(astraflow_encode, astraflow_apply, compressed=False),
    "slime": Peer(slime_encode, slime_apply, compressed=True),
    "pulse": Peer(pulse_encode, pulse_apply, compressed=True),
}


# ------------------------------------------------------------ measuring


def bits(tensor: torch.Tensor) -> Array:
    array: Array = tensor.view(torch.int16).numpy()
    return array.view(np.uint16)


def sizes(report: Report, rate: float, old: torch.Tensor, new: torch.Tensor) -> None:
    changed = int((bits(old) != bits(new)).sum())
    delta = encode(old, new)
    assert np.array_equal(bits(apply(old, delta)), bits(new))
    case = f"lr {rate:g}, {100 * changed / old.numel():.2f} % changed"
    ours, unit = len(delta) / changed, "B/changed"
    report.add(f"{case}: bound", ours, bound(old, new) / changed, unit=unit, goal=NEAR_BOUND, less_is_better=True)
    for name, peer in PEERS.items():
        if peer.compressed and codec() is None:
            report.add(f"{case}: {name}", ours, None, unit=unit, reason="pyarrow, which has zstd, is not installed")
            continue
        parts = peer.encode(bits(old), bits(new))
        assert np.array_equal(peer.apply(bits(old), parts), bits(new)), name
        theirs = sum(map(len, parts)) / changed
        report.add(f"{case}: {name}", ours, theirs, unit=unit, goal=1.0, less_is_better=True)


def speeds(report: Report, rate: float, old: torch.Tensor, new: torch.Tensor, repeats: int) -> None:
    delta = encode(old, new)
    old_bits, new_bits = bits(old), bits(new)
    work: dict[str, Callable[[], object]] = {
        "plain": lambda: (old_bits != new_bits, new_bits.copy()),
        "encode": lambda: encode(old, new),
        "apply": lambda: apply(old, delta),
    }
    for name, peer in PEERS.items():
        if codec() is not None or not peer.compressed:
            work |= _peer_work(name, peer, old_bits, new_bits)
    taken = dict(zip(work, interleave([_timer(step) for step in work.values()], repeats), strict=True))
    speed = {name: old.nbytes / seconds / 1e9 for name, seconds in taken.items()}
    for step in ("encode", "apply"):
        report.add(f"lr {rate:g}: {step}, plain", speed[step], speed["plain"], unit="GB/s", goal=SPEED)
        for name in PEERS:
            if f"{name} {step}" in speed:
                report.add(f"lr {rate:g}: {step}, {name}", speed[step], speed[f"{name} {step}"], unit="GB/s")


def _peer_work(name: str, peer: Peer, old: Array, new: Array) -> dict[str, Callable[[], object]]:
    parts = peer.encode(old, new)
    return {f"{name} encode": lambda: peer.encode(old, new), f"{name} apply": lambda: peer.apply(old, parts)}


def _timer(step: Callable[[], object]) -> Callable[[int], float]:
    def measure(_: int) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return measure


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rows", type=int, default=4096, help="the matrix has this many rows of 4096 weights")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    shape = (min(options.rows, 512) if options.quick else options.rows, 4096)
    report = Report("weights")
    for rate in RATES:
        old, new = update(shape, rate)
        sizes(report, rate, old, new)
        if rate == RATES[0] or not options.quick:
            speeds(report, rate, old, new, repeats=3 if options.quick else 7)
    report.finish(options.json)


if __name__ == "__main__":
    main()
