"""How well a worker is suited to training and to rollout, by the classical roofline.

A device with peak compute P and memory bandwidth B attains min(P, I * B) FLOP/s on work that does I FLOP for each byte
it moves; beyond the ridge point P / B it is bound by compute, below it by memory. Training multiplies large matrices
and reuses every byte hundreds of times: it attains P. Decoding reads all weights and the cache for each token of a
batch: it attains D = min(P, DECODE_INTENSITY * B). So

    train_priority = P * (P / D)

the training rate times its ratio to the decoding rate: the absolute and the comparative advantage. It is strictly
increasing in P and never increasing in B; so of {high compute, low bandwidth} and {low compute, high bandwidth} the
first trains, and of two devices that differ only in size the larger.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rillflow.errors import RunError

# FLOP for each byte of weights and cache: a batch of a few sequences, or query heads that share their keys, in bf16.
DECODE_INTENSITY = 8.0
_DEADLINE = 60.0  # seconds for a measurement in a process of its own; nearly all of it is for loading torch
_SIZE_CPU, _SIZE_GPU = 512, 8192
_BYTES_CPU, _BYTES_GPU = 64 << 20, 1 << 30
_ROUNDS = 5


@dataclass(frozen=True)
class Roofline:
    """Peak compute in TFLOP/s and memory bandwidth in GB/s, both above 0."""

    tflops: float
    bandwidth: float

    def attainable(self, intensity: float) -> float:
        """Return the attainable TFLOP/s at `intensity` FLOP a byte."""
        return min(self.tflops, intensity * self.bandwidth / 1e3)

    @property
    def ridge(self) -> float:
        """The intensity in FLOP a byte above which compute is the bound."""
        return self.tflops * 1e3 / self.bandwidth

    @property
    def train_priority(self) -> float:
        return self.tflops * (self.tflops / self.attainable(DECODE_INTENSITY))


def measure(threads: int = 1) -> Roofline:
    """Measure the first GPU, or `threads` cores. Takes well under a second once torch is imported.

    The best of a few rounds counts: a disturbance makes a round slower, never faster.
    """
    import torch

    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    if threads and not gpu:
        torch.set_num_threads(threads)
    size = _SIZE_GPU if gpu else _SIZE_CPU
    left = torch.ones(size, size, dtype=torch.bfloat16 if gpu else torch.float32, device=device)
    product = torch.empty_like(left)
    source = torch.zeros(_BYTES_GPU if gpu else _BYTES_CPU, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize()

    multiply = _best(lambda: torch.mm(left, left, out=product), wait)
    copy = _best(lambda: target.copy_(source), wait)
    return Roofline(2 * size**3 / multiply / 1e12, 2 * source.numel() / copy / 1e9)


def _best(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return the seconds of the fastest round; the first one warms up and does not count."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def measure_apart(threads: int) -> Roofline:
    """Run `measure` in a subprocess with a deadline: the caller needs no torch, and no driver can hang it."""
    command = [sys.executable, "-m", "rillflow.resources.roofline", "--threads", str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE, check=True)
        values = json.loads(done.stdout)
        return Roofline(float(values["tflops"]), float(values["bandwidth"]))
    except (subprocess.SubprocessError, ValueError, KeyError) as error:
        raise RunError(
            f"this machine could not be measured: {error}", "declare tflops and bandwidth in resources.workers"
        ) from error


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure this machine's peak compute and memory bandwidth.")
    parser.add_argument("--threads", type=int, default=1)
    found = measure(parser.parse_args().threads)
    print(json.dumps({"tflops": found.tflops, "bandwidth": found.bandwidth}))


if __name__ == "__main__":
    main()
