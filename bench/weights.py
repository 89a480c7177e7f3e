"""Deltas of weights: how small they are and how fast they are made and applied, beside the formats of others.

The versions are real (`bench.weights_train`): consecutive ones of SmolLM2-135M, trained with the trainer's AdamW. The
first run trains them and keeps them in the folder `--pairs`; --quick trains with one of the three learning rates. Every
format gives the new version back, bit for bit (checked), before it is measured.

* conditioned bound: the entropy of positions and changes given the exponents of the old weights, with the frequencies
  of the model as a whole. What it takes to tell the frequencies counts nothing.
* bound by tensor: the same, with the frequencies of each tensor; small ones take more to tell than they save.
* plain bound: the entropy of positions and changes when all weights of the model are alike.
* the formats: `bench.delta_formats`.

Bytes are per changed weight and of whole files; the manifest beside ours does not count. Speed is in GB of model a
second on one thread, ours with all of its verification, medians taken in turns. "Plain" is a comparison of old and new
that yields the changed positions, and a copy into memory that is already there. `encode` and `apply` are the codec,
which like trainers and nodes knows the fingerprint of the base; `publish` and `take` are what a trainer and a node do
with a version on top of it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.common import Report, interleave, parser
from bench.delta_formats import FORMATS, Bits, frame
from bench.delta_formats.entropy import bound
from bench.weights_train import RATES, WARM, Folder, Weights
from rillflow.weights import delta, delta_file
from rillflow.weights.delta_file import Part, changes_of, joined, piece_of, runs
from rillflow.weights.fingerprint import fingerprint, moved
from rillflow.weights.previous import Previous

NEAR_BOUND, SPEED, GROWTH = 1 / 1.10, 0.5, 0.8
# AstraFlow's paper sends 1.5 GB for a version of a model of so many weights; its index has 8 bytes from 2**32 on.
LARGE, _WIDE_INDEX = 14.8e9, 8
PUBLISHED = 1.5e9 / (_WIDE_INDEX + 2)  # changed weights
_INTEGERS = {2: torch.int16, 4: torch.int32}
_FIELDS = {torch.bfloat16: (7, 0xFF), torch.float16: (10, 0x1F), torch.float32: (23, 0xFF)}  # mantissa, exponent


def bits(weights: Weights) -> Bits:
    """The same memory as matrices of unsigned integers; a vector is one column."""
    found = {}
    for name, weight in weights.items():
        array: Any = weight.view(_INTEGERS[weight.element_size()]).numpy()
        found[name] = array.view(f"u{weight.element_size()}").reshape(len(array), -1)
    return found


def copied(weights: Weights) -> Weights:
    return {name: weight.clone() for name, weight in weights.items()}


# ------------------------------------------------------------ ours


class Run(NamedTuple):
    """Weights that share a delta, end to end."""

    old: torch.Tensor
    new: torch.Tensor
    known: int
    data: bytes | memoryview


class Version(NamedTuple):
    """Old and new weights with their fingerprints, and what lies between: `runs` as the codec has them, `pieces` as
    they are published."""

    old: Weights
    new: Weights
    known: dict[str, int]
    result: dict[str, int]
    runs: list[Run]
    pieces: list[delta_file.Piece]


def whole_parts(tensors: Mapping[str, torch.Tensor]) -> dict[Part, torch.Tensor]:
    return {Part(name, 0, tensor.numel()): tensor for name, tensor in tensors.items()}


def version(old: Weights, new: Weights) -> Version:
    found, published = [], []
    before, after = whole_parts(old), whole_parts(new)
    for parts in runs(after):
        pair = [joined([side[part] for part in parts]).clone() for side in (before, after)]
        known = fingerprint(pair[0])
        found.append(Run(*pair, known, delta.encode(*pair, known).data))
        piece = piece_of(parts, *pair, known).piece
        published += [piece] if piece else []
    known, result = ({name: fingerprint(weight) for name, weight in side.items()} for side in (old, new))
    return Version(old, new, known, result, found, published)


def file_size(pieces: Sequence[delta_file.Piece]) -> int:
    """Bytes of the file that is published."""
    return sum(len(part) for part in delta_file.write(pieces))


def take(held: Weights, case: Version) -> None:
    """Do a node's work with a received file: decode all, compare all fingerprints, then write."""
    changes = [change for piece in case.pieces for change in changes_of(piece, held, case.known).items()]
    for name, change in changes:
        assert moved(case.known[name], held[name], change) == case.result[name], name
    for name, (index_K, value_K) in changes:
        held[name].view(-1)[slice(None) if index_K is None else index_K] = value_K


# ------------------------------------------------------------ sizes


class Count(NamedTuple):
    """The sizes of a pair of versions; entropies in bytes."""

    weights: int
    changed: int
    conditioned: float
    by_tensor: float
    plain: float


def count(old: Weights, new: Weights) -> Count:
    sizes_E = np.zeros(256, np.int64)
    exponents, steps = [], []
    for dtype, old_bits, new_bits in _paired(old, new):
        exponent_N = _exponents(old_bits, dtype)
        sizes_E += np.bincount(exponent_N, minlength=256)
        changed = np.flatnonzero(old_bits != new_bits)
        exponents.append(exponent_N[changed])
        steps.append(_steps(old_bits[changed], new_bits[changed]))
    exponent_K, step_K = np.concatenate(exponents), np.concatenate(steps)
    weights = int(sizes_E.sum())
    conditioned = sum(
        _entropy(step_K[exponent_K == exponent], int(size)) for exponent, size in enumerate(sizes_E) if size
    )
    by_tensor = sum(bound(old[name], weight) for name, weight in new.items())
    return Count(weights, len(step_K), conditioned, by_tensor, _entropy(step_K, weights))


def _entropy(steps: np.ndarray, weights: int) -> float:
    """Bytes of an ideal code for what happens to each of these weights: nothing, or one of the steps."""
    counts = np.append(np.unique(steps, return_counts=True)[1], weights - len(steps))
    counts = counts[counts > 0].astype(np.float64)
    return float(counts @ np.log2(weights / counts)) / 8


def _paired(old: Weights, new: Weights) -> list[tuple[torch.dtype, np.ndarray, np.ndarray]]:
    old_bits, new_bits = bits(old), bits(new)
    return [(new[name].dtype, old_bits[name].reshape(-1), new_bits[name].reshape(-1)) for name in new]


def _exponents(array: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    mantissa, mask = _FIELDS[dtype]
    return (array >> mantissa).astype(np.uint8) & mask


def _steps(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The changes in units in the last place: of integers that are ordered as the weights are."""
    top = 1 << 8 * old.itemsize - 1
    before, after = (np.where(b & top, ~(b & top - 1).astype(np.int64), b) for b in (old, new))
    return after - before


def peer_size(name: str, old: Weights, new: Weights) -> int:
    """The times of a delta that was applied and gave the new weights."""
    data = FORMATS[name].encode(bits(old), bits(new))
    held = copied(old)
    FORMATS[name].apply(bits(held), data)
    check(held, new, name)
    return len(data)


def real_size(case: Version) -> int:
    """The same of ours."""
    held = copied(case.old)
    take(held, case)
    check(held, case.new, "ours")
    return file_size(case.pieces)


def check(held: Weights, new: Weights, what: str) -> None:
    for (name, got), expected in zip(bits(held).items(), bits(new).values(), strict=True):
        assert np.array_equal(got, expected), f"{what} gives other bits for {name}"


def sizes(report: Report, rate: float, case: Version) -> None:
    """Bytes per changed weight, and of versions."""
    told, size = count(case.old, case.new), real_size(case)
    each, name = size / told.changed, f"lr {rate:g}, {100 * told.changed / told.weights:.2f} % changed"

    def row(peer: str, theirs: float, goal: float | None = 1.0) -> None:
        report.add(f"{name}: {peer}", each, theirs / told.changed, unit="B/changed", goal=goal, less_is_better=True)

    row("conditioned bound", told.conditioned, NEAR_BOUND)
    row("bound by tensor", told.by_tensor, None)
    row("plain bound", told.plain)
    for peer in FORMATS:
        row(peer, peer_size(peer, case.old, case.new))
    if rate == RATES[0]:
        whole(report, case.new, size)
        large(report, rate, told, size)


def whole(report: Report, new: Weights, size: int) -> None:
    """Return the bytes of the version without a delta."""
    raw = sum(weight.nbytes for weight in new.values())
    squeezed = sum(len(frame.squeeze(np.ascontiguousarray(array))) for array in bits(new).values())
    for peer, theirs in (("whole, raw", raw), ("whole, zstd-1", squeezed)):
        report.add(f"version of lr {RATES[0]:g}: {peer}", size / 1e6, theirs / 1e6, unit="MB", less_is_better=True)


def large(report: Report, rate: float, told: Count, size: int) -> None:
    """A large model of which the same share changes, and one with as many changes as AstraFlow's paper sends."""
    each, changed = size / told.changed, told.changed / told.weights * LARGE
    cases = {
        f"{100 * changed / LARGE:.2f} % changed as at lr {rate:g}, AstraFlow": changed,
        f"{100 * PUBLISHED / LARGE:.2f} % changed, AstraFlow's paper": PUBLISHED,
    }
    for name, count in cases.items():
        ours, theirs = count * each / 1e9, count * (_WIDE_INDEX + 2) / 1e9
        report.add(f"{LARGE / 1e9:g}B weights, {name}", ours, theirs, unit="GB", less_is_better=True)


def other(report: Report, name: str, old: Weights, new: Weights) -> None:
    """A pair of which only the size matters."""
    told, size = count(old, new), real_size(version(old, new))
    raw = sum(weight.nbytes for weight in new.values())
    name = f"{name}, {100 * told.changed / told.weights:.2f} % changed"
    peers = {"conditioned bound": told.conditioned, "plain bound": told.plain, "whole, raw": raw}
    for peer, theirs in peers.items():
        each = size / told.changed
        report.add(f"{name}: {peer}", each, theirs / told.changed, unit="B/changed", less_is_better=True)


# ------------------------------------------------------------ speeds


class Bench:
    """What is measured on one version. Whatever changes `held` is undone, which does not count."""

    def __init__(self, case: Version) -> None:
        self.case = case
        self.bytes = sum(weight.nbytes for weight in case.new.values())
        self.weights = sum(weight.numel() for weight in case.new.values())
        self._old, self._new = bits(case.old), bits(case.new)
        self._held = copied(case.old)
        self._joined = [run.old.clone() for run in case.runs]
        self._published = Previous()
        self._published.hold(whole_parts(case.old), {}, 0, {}, [run.known for run in case.runs])

    def ours(self) -> dict[str, Callable[[], object]]:
        """The codec alone, and all that a trainer or a node does."""
        case = self.case
        return {
            "encode": lambda: [delta.encode(run.old, run.new, run.known) for run in case.runs],
            "apply": lambda: [
                delta.apply_(held, run.data, run.known) for held, run in zip(self._joined, case.runs, strict=True)
            ],
            "publish": lambda: self._published.difference(whole_parts(case.new), most=math.inf),
            "take": lambda: take(self._held, case),
        }

    def theirs(self) -> dict[str, Callable[[], object]]:
        held, work = bits(self._held), {}
        for name, peer in FORMATS.items():
            data = peer.encode(self._old, self._new)
            work[f"{name}, encode"] = lambda encode=peer.encode: encode(self._old, self._new)
            work[f"{name}, apply"] = lambda apply=peer.apply, data=data: apply(held, data)
        return work

    def plain(self) -> None:
        """Find what changed, and copy."""
        for name, into in bits(self._held).items():
            np.flatnonzero(self._old[name] != self._new[name])
            np.copyto(into, self._new[name])

    def timed(self, step: Callable[[], object]) -> Callable[[int], float]:
        """Processor seconds, which is what one thread takes on a machine of its own."""

        def measure(_: int) -> float:
            start = time.process_time()
            step()
            taken = time.process_time() - start
            self._undo()
            return taken

        return measure

    def _undo(self) -> None:
        for name, weight in self._held.items():
            weight.copy_(self.case.old[name])
        for held, run in zip(self._joined, self.case.runs, strict=True):
            held.copy_(run.old)


def speeds(report: Report, rate: float, bench: Bench, repeats: int) -> None:
    """GB of model a second: ours beside plain, and beside each of the others."""
    work = {"plain": bench.plain} | bench.ours() | bench.theirs()
    seconds = interleave([bench.timed(step) for step in work.values()], repeats)
    speed = {name: bench.bytes / taken / 1e9 for name, taken in zip(work, seconds, strict=True)}
    for step, path in (("encode", "publish"), ("apply", "take")):
        report.add(f"lr {rate:g}: {step}, plain", speed[step], speed["plain"], unit="GB/s", goal=SPEED)
        report.add(f"lr {rate:g}: {path}, plain", speed[path], speed["plain"], unit="GB/s")
        for name in FORMATS:
            report.add(f"lr {rate:g}: {step}, {name}", speed[step], speed[f"{name}, {step}"], unit="GB/s")


def growth(report: Report, bench: Bench, repeats: int) -> None:
    """Time a weight for the whole model and for a tenth of it."""
    small = Bench(version(tenth(bench.case.old), tenth(bench.case.new)))
    measures = [one.timed(step) for one in (bench, small) for step in one.ours().values()]
    seconds = iter(interleave(measures, repeats))
    each = [{step: 1e9 * next(seconds) / one.weights for step in one.ours()} for one in (bench, small)]
    for step, large_ns in each[0].items():
        name = f"{step}: {bench.weights / 1e6:.0f}M beside {small.weights / 1e6:.0f}M weights"
        report.add(name, large_ns, each[1][step], unit="ns/weight", goal=GROWTH, less_is_better=True)


def tenth(weights: Weights) -> Weights:
    """Some layers of the model, about a tenth of its weights."""
    return {
        name: weight for name, weight in weights.items() if any(f"layers.{layer}." in name for layer in (0, 9, 19, 29))
    }


def main() -> None:
    arguments = parser(__doc__ or "")
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "rillflow" / "bench-weights"
    arguments.add_argument("--pairs", type=Path, default=cache, metavar="FOLDER", help="keeps the trained versions")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what they are trained on")
    options = arguments.parse_args()
    folder = Folder(options.pairs.expanduser(), options.device)
    rates = RATES[:1] if options.quick else RATES
    for rate in rates:
        folder.make(rate)
    torch.set_num_threads(1)
    report = Report("weights")
    repeats = 3 if options.quick else 7
    for rate in rates:
        case = version(*folder.pair(rate, WARM + 1))
        sizes(report, rate, case)
        speeds(report, rate, Bench(case), repeats)
        if rate == RATES[0]:
            growth(report, Bench(case), repeats)
    other(report, f"lr {RATES[0]:g}, the first step", *folder.pair(RATES[0], 1))
    if options.device == "cpu":
        masters = [tenth(part) for part in folder.pair(RATES[0], WARM + 1, torch.float32)]
        other(report, "a tenth in fp32", *masters)
        other(report, "a tenth in fp16", *({n: w.half() for n, w in part.items()} for part in masters))
    report.finish(options.json)


if __name__ == "__main__":
    main()
