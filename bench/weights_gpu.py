"""Deltas on a GPU: how fast a trainer's kernels make them and a server's workers apply them, beside a plain copy.

The weights are those of a model of 1.7B parameters in bf16, before and after a step of training: the steps of
`bench.weights_train` (AdamW on fp32 masters, at each learning rate), and noise instead of steps where more has changed
(1, 2.5 and 4 % of all weights). Speed is in GB of model a second by the wall clock, from tensors on the device to bytes
on the host and back; the fingerprints of the old weights are known, as they are to a publisher. A worker verifies what
it holds afterwards, which is not part of this. Small deltas of all kinds are exchanged with the codec of the host in
both directions, and the large ones are applied and compared, bit for bit. `--quick`: the highest learning rate alone.

Random weights are small, and so a step changes more of them than of trained ones. With `--smollm2 FILE` (the package's
.gguf) the steps are those of SmolLM2-135M instead, each tensor as often as makes a model of that size.

`--profile FILE` writes what each kernel and each call on the host takes.
"""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from bench import weights_train
from bench.common import Report, parser
from bench.delta_formats.entropy import bound
from rillflow.engine.servers.inside.rillflow_delta import Piece, apply_all
from rillflow.kernels.delta import gpu
from rillflow.weights import delta

SHARES = (0.01, 0.025, 0.04)
ENCODE_GOAL = 300.0
REPEATS = 7
LAYERS = 28
COPIES = 13  # of a model of 135M weights
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def shapes(layers: int) -> Iterator[tuple[int, ...]]:
    """Qwen3-1.7B's."""
    yield (151936, 2048)
    for _ in range(layers):
        yield from [(2048, 2048), (1024, 2048), (1024, 2048), (2048, 2048), (6144, 2048), (6144, 2048), (2048, 6144)]
        yield from [(2048,), (2048,), (128,), (128,)]


# ------------------------------------------------------------ exactness


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    kind = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.view(kind), other.view(kind).to(one.device))


def small_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(0)
    for count in (1, 1000, 70001, 300_000):
        base = (0.02 * torch.randn(count, generator=source)).to(dtype)
        for share in (0.0, 0.01, 0.3, 1.0):
            step = 1 + 0.02 * torch.randn(count, generator=source)
            chosen = torch.rand(count, generator=source) < share
            yield f"{dtype} {count} {share}", base, torch.where(chosen, (base * step).to(dtype), base)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    base, noise = (torch.randint(-(2**31), 2**31, (4_300_000,), generator=source).to(kind) for _ in range(2))
    other = torch.where(torch.rand(len(base), generator=source) < 0.02, noise, base)
    yield f"{dtype} any bits, two segments", base.view(dtype), other.view(dtype)


def exchange(name: str, base: torch.Tensor, new: torch.Tensor) -> None:
    """Both codecs read what either writes."""
    on_gpu = base.cuda()
    theirs, ours = delta.encode(base, new), gpu.encode_gpu(on_gpu, new.cuda())
    assert ours[1:] == theirs[1:], f"{name}: fingerprints {ours[1:]} instead of {theirs[1:]}"
    assert gpu.encode_gpu(on_gpu, new.cuda(), theirs.base)[1:] == theirs[1:], f"{name}: known"
    assert same_bits(delta.apply(base, ours.data), new), f"{name}: the host reads something else"
    for data in (ours.data, theirs.data):
        held = on_gpu.clone()
        apply_all([Piece(held, memoryview(data))])
        assert same_bits(held, new), f"{name}: the device reads something else"
        assert gpu.fingerprint_gpu(held) == theirs.result, f"{name}: fingerprint"


def check_small(dtype: torch.dtype) -> None:
    start, failed = time.perf_counter(), 0
    cases = list(small_cases(dtype))
    for name, base, new in cases:
        try:
            exchange(name, base, new)
        except Exception as problem:  # the rest is still worth knowing
            failed += 1
            print(f"NOT EXACT {name}: {problem!r}"[:2000], file=sys.stderr)
    print(f"exact: {len(cases) - failed} of {len(cases)} cases, {time.perf_counter() - start:.1f} s", file=sys.stderr)


# ------------------------------------------------------------ weights


def updated(shape: tuple[int, ...], rate: float, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before and after a step whose size is the rate, more or less."""
    master = 0.02 * torch.randn(shape, generator=source, device="cuda")
    step = rate * torch.randn(shape, generator=source, device="cuda")
    return master.bfloat16(), (master + step).bfloat16()


def rate_for(share: float, source: torch.Generator) -> float:
    low, high = 1e-8, 1e-3
    for _ in range(20):
        middle = (low * high) ** 0.5
        old, new = updated((2048, 2048), middle, source)
        low, high = (middle, high) if (old != new).float().mean().item() < share else (low, middle)
    return middle


def moved(share: float) -> Pairs:
    """By noise, of which so much is seen in bf16."""
    source = torch.Generator("cuda").manual_seed(0)
    rate = rate_for(share, source)
    return [updated(shape, rate, source) for shape in shapes(LAYERS)]


def trained(rate: float, file: Path | None) -> Pairs:
    """By a step of training, after some others; of the model in the file, several times."""
    kept = [
        [torch.cat([weight.bfloat16()] * (1 if file is None else COPIES)) for weight in weights.values()]
        for step, weights in weights_train.train("cuda", rate, file)
        if step >= weights_train.WARM
    ]
    torch.cuda.empty_cache()
    return list(zip(*kept, strict=True))


# ------------------------------------------------------------ measuring


def seconds(step: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    taken = []
    for _ in range(REPEATS):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


class Case:
    """A model before and after a step, and its deltas. The goals are those of steps of training."""

    def __init__(self, name: str, pairs: Pairs, goals: bool) -> None:
        self.pairs, self._goals = pairs, goals
        self.size = sum(old.nbytes for old, _ in self.pairs)
        self.held = [old.clone() for old, _ in self.pairs]
        self.made = gpu.encode_many(self.pairs)
        self.known = [one.base for one in self.made]
        self.changed = sum(one.changed for one in self.made)
        self.name = f"{name}, {200 * self.changed / self.size:.2f} % changed"

    def reset(self) -> None:
        for to, (old, _) in zip(self.held, self.pairs, strict=True):
            to.copy_(old)

    def encode(self) -> None:
        gpu.encode_many(self.pairs, self.known)

    def apply(self) -> None:
        apply_all(Piece(to.view(-1), memoryview(one.data)) for to, one in zip(self.held, self.made, strict=True))

    def copy_speed(self, report: Report) -> None:
        copied = self.size / seconds(self.reset) / 1e9
        report.add(f"{self.name}: plain copy", copied, None, unit="GB/s", reason="for comparison")

    def encode_speed(self, report: Report) -> None:
        encoded = self.size / seconds(self.encode) / 1e9
        print(f"{self.name}: encode {encoded:.0f} GB/s", file=sys.stderr)
        name, unit = f"{self.name}: encode", "GB/s"
        if self._goals:
            report.add(name, encoded, ENCODE_GOAL, unit=unit, goal=1.0, reason="the peer is the goal")
        else:
            report.add(name, encoded, None, unit=unit, reason="more than training changes")

    def apply_speed(self, report: Report) -> None:
        self.reset()
        self.apply()
        same = all(same_bits(to, new) for to, (_, new) in zip(self.held, self.pairs, strict=True))
        assert same, "a large delta is not exact"
        applied = self.size / seconds(self.apply, self.reset) / 1e9
        print(f"{self.name}: apply {applied:.0f} GB/s", file=sys.stderr)
        report.add(f"{self.name}: apply", applied, None, unit="GB/s", reason="by torch, as workers do")

    def sizes(self, report: Report) -> None:
        number = min(range(len(self.pairs)), key=lambda number: abs(self.pairs[number][0].numel() - (1 << 22)))
        (old, new), one = self.pairs[number], self.made[number]
        least = bound(old.cpu(), new.cpu()) / one.changed
        name, unit = f"{self.name}: {old.numel()} weights", "B/changed"
        report.add(name, len(one.data) / one.changed, least, unit=unit, goal=1 / 1.1, less_is_better=True)
        sent = sum(len(one.data) for one in self.made) / self.changed
        report.add(f"{self.name}: all", sent, None, unit=unit, reason="bytes of all deltas")

    def alone(self, report: Report) -> None:
        """Tensors that have a call of their own."""
        for (old, new), known in list(zip(self.pairs, self.known, strict=True))[1::-1]:
            taken = seconds(partial(gpu.encode_gpu, old, new, known))
            name = f"{self.name}: encode {old.nbytes / 1e6:.0f} MB alone"
            report.add(name, old.nbytes / taken / 1e9, None, unit="GB/s", reason="one tensor in a call")


def profile(name: str, step: Callable[[], object], to: Path, before: Callable[[], object] = lambda: None) -> None:
    """Append what each kernel and each call on the host takes."""
    from torch.profiler import ProfilerActivity

    before()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as taken:
        step()
        torch.cuda.synchronize()
    averages = taken.key_averages()
    with to.open("a") as file:
        for key in ("self_cuda_time_total", "self_cpu_time_total"):
            file.write(f"{name}\n{averages.table(sort_by=key, row_limit=40, max_name_column_width=60)}\n")


def examine(report: Report, case: Case, profile_to: str | None) -> None:
    for part in (case.copy_speed, case.encode_speed, case.sizes, case.alone):
        attempt(part, report)
    if profile_to:
        attempt(profile, f"{case.name}: encode", case.encode, Path(profile_to))
    attempt(case.apply_speed, report)
    if profile_to:
        attempt(profile, f"{case.name}: apply", case.apply, Path(profile_to), case.reset)


def cases(*, quick: bool, file: Path | None) -> Iterator[Case]:
    for rate in weights_train.RATES[-1:] if quick else weights_train.RATES:
        yield Case(f"{'random weights' if file is None else 'SmolLM2'}, lr {rate:g}", trained(rate, file), goals=True)
    for share in () if quick or file is not None else SHARES:
        yield Case("noise", moved(share), goals=False)


def attempt(step: Callable[..., object], *arguments: object) -> None:
    """One failure must not hide the rest: time on a device is dear."""
    start = time.perf_counter()
    try:
        step(*arguments)
    except Exception:
        traceback.print_exc()
    print(f"{step.__qualname__}: {time.perf_counter() - start:.1f} s", file=sys.stderr)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--profile", metavar="FILE", help="write the time of each kernel to FILE")
    arguments.add_argument("--smollm2", type=Path, metavar="FILE", help="train the model in this file")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.weights_gpu needs a CUDA device")
    report = Report("weights_gpu")
    attempt(check_small, torch.bfloat16)
    for case in cases(quick=options.quick, file=options.smollm2):
        attempt(examine, report, case, options.profile)
    for dtype in () if options.quick else (torch.float16, torch.float32):
        attempt(check_small, dtype)
    report.finish(options.json)


if __name__ == "__main__":
    main()
