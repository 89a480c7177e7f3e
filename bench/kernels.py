"""What each compiled kernel of the CPU gains: core milliseconds of a sample with all kernels, and without one of them.

The work is that of `bench.endtoend --case equal`: a Qwen3 of 0.88 million weights, groups of 8 answers of 32 tokens to
a prompt of 30. `trainer` is forward and backward of 128 samples as trees, `engine` is the sampling of 128 answers, and
of 128 answers of mixed lengths (those of `bench.engine`), on one thread each. Processor time is measured, so other work
on the machine matters little. The delta codec is measured by the seconds of a version of 135 million weights
in bf16 of which 0.5 % changed: encoded by a trainer, decoded by a node.

    python -m bench.kernels --json -
    python -m bench.kernels --whole tails --json -     # equal, tails, tools

The settings take turns; medians are reported. `--whole` measures whole training runs instead: our side of a case of
`bench.endtoend`, all processes counted, with all kernels and without each of those that it uses.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel

from bench import endtoend
from bench import endtoend_task as task
from bench.common import Report, parser
from bench.engine import mixed_lengths
from bench.tree import Case, make_rows
from rillflow import kernels
from rillflow.config import TrainerConfig
from rillflow.engine.embedded import EmbeddedEngine
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.packing import micro_batches
from rillflow.types import GenerateRequest, Sampling
from rillflow.weights.delta import decode, encode
from rillflow.weights.models import load_policy_model

PROMPT, SAMPLES = 30, 128
WEIGHTS, CHANGED = 135_000_000, 0.005


def setting(without: str) -> str:
    return ",".join(name for name in kernels.NAMES if name != without) if without != "all" else "off"


def trainer(model: PreTrainedModel) -> Callable[[], float]:
    forward = PolicyForward(model, TrainerConfig(trees=True))
    case = Case(PROMPT / (PROMPT + task.EQUAL), PROMPT + task.EQUAL, task.GROUP, SAMPLES // task.GROUP)
    rows = Databuffer(make_rows(case, model.config.vocab_size))
    micros = [make() for make in micro_batches(rows, [], 3072, device=torch.device("cpu"), trees=True)]

    def measure() -> float:
        began = time.process_time()
        for micro in micros:
            logprob_T, _ = forward(micro)
            (-logprob_T.sum()).backward()
        return 1000 * (time.process_time() - began) / SAMPLES

    return measure


def engine(model: PreTrainedModel, lengths: list[int]) -> Callable[[], float]:
    async def one(made: EmbeddedEngine, number: int) -> None:
        tokens = [(7 * (number // task.GROUP) + at) % 50 for at in range(PROMPT)]
        sampling = Sampling(max_tokens=lengths[number], seed=number)
        async for _ in made.generate(GenerateRequest(id=str(number), tokens=tokens, sampling=sampling)):
            pass

    async def all_of_them() -> float:
        made = EmbeddedEngine(model, slots=SAMPLES, context=192)
        await made.start()
        began = time.process_time()
        await asyncio.gather(*(one(made, number) for number in range(SAMPLES)))
        took = time.process_time() - began
        await made.close()
        return 1000 * took / SAMPLES

    return lambda: asyncio.run(all_of_them())


def delta(weights: int) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(1)
    base = (0.02 * torch.randn(weights, generator=generator)).bfloat16()
    new = torch.where(torch.rand(weights, generator=generator) < CHANGED, base * 1.01, base)

    def measure() -> float:
        began = time.process_time()
        decode(base, encode(base, new).data)
        return (time.process_time() - began) * WEIGHTS / weights

    return measure


def compare(
    report: Report,
    what: str,
    names: tuple[str, ...],
    make: Callable[[], Callable[[], float]],
    *,
    repeats: int,
    unit: str,
) -> None:
    ways: dict[str, Callable[[], float]] = {}
    for without in ("", *names, "all"):
        os.environ[kernels.VARIABLE] = setting(without)
        ways[without] = make()
        ways[without]()  # compiles
    seen: dict[str, list[float]] = {without: [] for without in ways}
    for _ in range(repeats):
        for without, measure in ways.items():
            os.environ[kernels.VARIABLE] = setting(without)
            seen[without].append(measure())
    os.environ.pop(kernels.VARIABLE)
    ours = statistics.median(seen[""])
    for without in (*names, "all"):
        report.add(f"{what} without {without}", ours, statistics.median(seen[without]), unit=unit, less_is_better=True)


def whole(report: Report, case: str, *, repeats: int, steps: int) -> None:
    """Compare the core milliseconds of a sample of whole training runs."""
    job = msgspec.structs.replace(endtoend.CASES[case], steps=steps)
    names = ("", "layers", "decode")
    seen: dict[str, list[float]] = {without: [] for without in names}
    for repeat in range(repeats):
        for without in names:
            os.environ[kernels.VARIABLE] = setting(without)
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                side = endtoend.ours(case, job, endtoend.prepare(case, job, repeat, folder), folder, repeat)
            seen[without].append(1000 * sum(side.cores.values()))
    os.environ.pop(kernels.VARIABLE)
    print(json.dumps(seen), file=sys.stderr)
    ours = statistics.median(seen[""])
    for without in names[1:]:
        other = statistics.median(seen[without])
        report.add(f"whole run, {case}, without {without}", ours, other, unit="ms/sample", less_is_better=True)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--whole", choices=tuple(endtoend.CASES), help="a case of bench.endtoend")
    made.add_argument("--repeats", type=int, default=3, help="whole runs of each setting")
    arguments = made.parse_args()
    report = Report("kernels")
    if arguments.whole:
        whole(report, arguments.whole, repeats=arguments.repeats, steps=8 if arguments.quick else 16)
        report.finish(arguments.json)
        return
    torch.set_num_threads(1)
    repeats = 5 if arguments.quick else 15
    with tempfile.TemporaryDirectory() as folder:
        path = task.make_model(Path(folder), 1)

        def model() -> PreTrainedModel:
            return load_policy_model(str(path), "fp32", torch.device("cpu"))

        compare(report, "trainer", ("layers",), lambda: trainer(model()), repeats=repeats, unit="ms/sample")
        works = {"engine": [task.EQUAL] * SAMPLES, "engine, mixed lengths": mixed_lengths(SAMPLES)}
        for name, lengths in works.items():
            make = partial(engine, model(), lengths)
            compare(report, name, ("decode",), make, repeats=repeats, unit="ms/sample")
        size = 2_000_000 if arguments.quick else 16_000_000
        compare(report, "a version by delta", ("delta",), lambda: delta(size), repeats=repeats, unit="s")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
