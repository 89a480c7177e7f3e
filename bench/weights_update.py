"""What an update of a server's weights takes: deltas decoded by its workers, beside deltas decoded on the node's host.

A real vLLM (or SGLang) server samples answers all the time. Versions are published as deltas, each with its probe, into
a folder, and are pulled from it: half of them as a node does that decodes deltas on its host (`peer`), half of them as
one does whose engine decodes them (`ours`). Every update is verified by fingerprints and by its probe. Versions differ
as after a step of Adam: each weight by noise of the size of the learning rate. The first update of each kind is left
out.

Rows: the seconds from the pull to the engine serving the version, and the parts: `fetch` (manifest and files; the
folder is on this machine), `decode` (on the host; in the workers, where it includes the upload and the writing of the
parameters), `hand over` (files in shared memory, calls to the server), `write` (by the workers), `verify` (fingerprints
of what the workers hold), `cut` (until no answer runs), `probe`; then the seconds without a token.

    python -m bench.weights_update --model smollm2-135m-instruct.gguf --dtype bf16 --python PYTHON --json -

Without `--model` it takes a small random one, which a CPU serves as well; there the host's compiled decoder is the
faster one, and nodes use it unless a recipe says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from bench.common import Report, parser
from bench.weights_probe import Trainer, Weights, model_of
from rillflow.config import PolicyConfig
from rillflow.engine.build import build_engine
from rillflow.types import GenerateRequest, Sampling
from rillflow.weights.pull import Puller
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import FolderSource

PARTS = ("fetch", "decode", "hand over", "write", "verify", "cut", "probe", "update", "without a token")
PROMPT = 16  # tokens
Seconds = dict[str, float]


class Publisher:
    """A trainer that publishes versions which differ by noise of the size of a learning rate."""

    def __init__(self, settings: PolicyConfig, folder: Path, rate: float) -> None:
        self._trainer, self._rate = Trainer(settings), rate
        self._noise = torch.Generator().manual_seed(1)
        self._store = FolderStore(folder, deltas=True, snapshot_every=1 << 20)
        self._store.publish(self._trainer.weights(), 0, None, self._trainer.probe())
        self.weights = sum(tensor.numel() for tensor in self._trainer.weights().values())

    def publish(self) -> int:
        """Return the bytes of the next version's delta."""
        optimizer = self._trainer.actor.optimizer
        assert optimizer is not None
        masters: Weights = {
            name: tensor + self._rate * torch.randn(tensor.shape, generator=self._noise).to(tensor.device)
            for name, tensor in optimizer.masters().items()
        }
        optimizer.restore(masters, optimizer.moments(), optimizer.steps)
        version = self._store.highest() + 1
        self._store.publish(self._trainer.weights(), version, version - 1, self._trainer.probe())
        return self._store.line().entries[version].delta_bytes


async def by_host(engine: Any, puller: Puller) -> Seconds:
    pulled = await puller.pull()
    assert pulled.patch is not None, "the host's copy is one version behind"
    began = time.perf_counter()
    await engine.patch(pulled.patch, pulled.version, pulled.probe)
    given = time.perf_counter() - began
    return {"fetch": pulled.transfer.fetch, "decode": pulled.transfer.verify} | parts(engine.update_seconds, given)


async def by_engine(engine: Any, puller: Puller) -> Seconds:
    pulled = await puller.pull(engine.version)
    assert pulled.deltas is not None, engine.decoding_refused
    began = time.perf_counter()
    await engine.apply_deltas(pulled.deltas, pulled.version, pulled.probe)
    given = time.perf_counter() - began
    return {"fetch": pulled.transfer.fetch} | parts(engine.update_seconds, given)


def parts(told: Mapping[str, float], given: float) -> Seconds:
    """What the engine tells of an update that took so long. The rest of it is the hand-over."""
    found = {part: told[part] for part in ("decode", "write", "verify", "cut", "probe") if part in told}
    return found | {"hand over": given - sum(found.values())}


async def update(publisher: Publisher, engine: Any, puller: Puller, how: Any) -> Seconds:
    await asyncio.to_thread(publisher.publish)
    before = engine.stats().load_seconds
    began = time.perf_counter()
    found: Seconds = await how(engine, puller)
    taken = time.perf_counter() - began
    return found | {"update": taken, "without a token": engine.stats().load_seconds - before}


@asynccontextmanager
async def answering(engine: Any, count: int, tokens: int) -> AsyncIterator[None]:
    """So many answers are sampled all the time."""

    async def ask(seed: int) -> None:
        prompt = torch.randint(0, 256, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
        request = GenerateRequest(id=str(seed), tokens=prompt, sampling=Sampling(max_tokens=tokens))
        while True:
            async for _ in engine.generate(request):
                pass

    tasks = [asyncio.create_task(ask(seed)) for seed in range(count)]
    try:
        yield
        assert not any(task.done() for task in tasks), "an answer has failed"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(settings: PolicyConfig, arguments: argparse.Namespace, folder: Path, report: Report) -> None:
    engine: Any = build_engine(settings, exact=False)
    publisher = Publisher(settings, folder, arguments.rate)
    puller = Puller(FolderSource(folder))
    await puller.pull()
    await engine.start()
    try:
        size = publisher.publish()  # of the first, which delays nothing
        await by_host(engine, puller)
        found: dict[Any, list[Seconds]] = {by_host: [], by_engine: []}
        async with answering(engine, arguments.answers, settings.engine.context - PROMPT):
            for how, taken in found.items():
                for _ in range(1 + arguments.updates):
                    taken.append(await update(publisher, engine, puller, how))
    finally:
        await engine.close()
        await puller.close()
    tell(report, found[by_engine][1:], found[by_host][1:], f"{publisher.weights / 1e6:.1f}M weights, {size} bytes")


def tell(report: Report, ours: list[Seconds], peer: list[Seconds], why: str) -> None:
    for part in PARTS:
        mine, theirs = (_median(taken, part) for taken in (ours, peer))
        if mine is None and theirs is not None:
            report.add(part, 0.0, None, unit="s", reason=f"{theirs:.4f} s where the host decodes; {why}")
        elif mine is not None:
            report.add(part, mine, theirs, unit="s", less_is_better=True, reason=why)


def _median(taken: list[Seconds], part: str) -> float | None:
    values = [one[part] for one in taken if part in one]
    return statistics.median(values) if values else None


def read_arguments() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--model", help="a folder or .gguf file; default: a small random one")
    made.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    made.add_argument("--python", default="python3", help="the interpreter that has vLLM or SGLang")
    made.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of trainer and engine")
    made.add_argument("--device", default="auto")
    made.add_argument("--rate", type=float, default=5e-6, help="the size of a step of a weight")
    made.add_argument("--updates", type=int, help="of each kind; default 20, with --quick 5")
    made.add_argument("--answers", type=int, help="sampled all the time; default 64, with --quick 8")
    made.add_argument("--server", action="append", default=[], help="a further argument of the server's command line")
    given = made.parse_args()
    given.updates = given.updates or (5 if given.quick else 20)
    given.answers = given.answers if given.answers is not None else (8 if given.quick else 64)
    return given


def main() -> None:
    arguments = read_arguments()
    report = Report("weights_update")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        server = {"python": arguments.python, "arguments": arguments.server, "decodes_deltas": True}
        engine = {
            "kind": arguments.engine,
            "dtype": arguments.dtype,
            "device": arguments.device,
            "slots": max(8, arguments.answers),
            "server": server,
        }
        settings = PolicyConfig.model_validate(
            {
                "model": model_of(arguments.model, folder / "model", arguments.quick),
                "engine": engine,
                "trainer": {"dtype": arguments.dtype, "device": arguments.device},
            }
        )
        asyncio.run(measure(settings, arguments, folder / "weights", report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
