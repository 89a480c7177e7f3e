"""What an update of a LoRA policy's server takes: adapters that vLLM adds to the base, beside merged weights.

A real vLLM server samples answers all the time. Versions are published as adapters, each with its probe, into a folder,
and are pulled from it: first as a node does whose vLLM adds adapters (`ours`), then as one does that merges them into
the base on its host and writes all weights (`peer`). Every update is verified and reproduces its probe. The first
update of each kind is left out.

Rows: the seconds from the pull to the engine serving the version, the seconds of them without a token, the bytes that a
version has, and the tokens per second that the server samples between updates: what vLLM's kernels for adapters cost.

    python -m bench.adapters_update --model FOLDER --dtype bf16 --rank 16 --python PYTHON --json -

Without `--model` it takes a small random one, which a CPU serves as well.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import Report, parser
from bench.weights_probe import Trainer, Weights, model_of
from bench.weights_update import PROMPT, answering
from rillflow.config import PolicyConfig
from rillflow.engine.build import build_engine
from rillflow.weights.pull import Puller
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import FolderSource

Seconds = dict[str, float]


class Publisher:
    """A trainer that publishes adapters which differ by noise."""

    def __init__(self, settings: PolicyConfig, folder: Path, rate: float) -> None:
        self._trainer, self._rate = Trainer(settings), rate
        self._noise = torch.Generator().manual_seed(1)
        self._store = FolderStore(folder)
        self._store.publish(self._trainer.weights(), 0, None, self._trainer.probe())
        self.weights = sum(tensor.numel() for tensor in self._trainer.weights().values())

    def publish(self) -> int:
        """Return the bytes of the next version."""
        optimizer = self._trainer.actor.optimizer
        assert optimizer is not None
        masters: Weights = {
            name: tensor + self._rate * torch.randn(tensor.shape, generator=self._noise).to(tensor.device)
            for name, tensor in optimizer.masters().items()
        }
        optimizer.restore(masters, optimizer.moments(), optimizer.steps)
        adapter, version = optimizer.adapter(), self._store.highest() + 1
        assert adapter is not None
        self._store.publish_adapter(adapter, version, version - 1, 0, self._trainer.probe())
        return self._store.line().entries[version].full_bytes


async def added(engine: Any, puller: Puller) -> None:
    pulled = await puller.pull(base=engine.base)
    assert pulled.adapter is not None, engine.adapters_refused
    await engine.apply_adapter(pulled.adapter, engine.base, pulled.version, pulled.probe)


async def merged(engine: Any, puller: Puller) -> None:
    pulled = await puller.pull()
    await engine.load(pulled.tensors, pulled.version, pulled.probe)


async def update(publisher: Publisher, engine: Any, puller: Puller, how: Any) -> Seconds:
    await asyncio.to_thread(publisher.publish)
    before = engine.stats().load_seconds
    began = time.perf_counter()
    await how(engine, puller)
    return {"update": time.perf_counter() - began, "without a token": engine.stats().load_seconds - before}


async def rate(engine: Any, seconds: float) -> float:
    before, began = engine.stats().generated_tokens, time.perf_counter()
    await asyncio.sleep(seconds)
    return (engine.stats().generated_tokens - before) / (time.perf_counter() - began)


async def measure(settings: PolicyConfig, arguments: argparse.Namespace, folder: Path, report: Report) -> None:
    engine: Any = build_engine(settings, exact=False)
    publisher = Publisher(settings, folder, arguments.rate)
    puller = Puller(FolderSource(folder))
    size = publisher.publish()  # of the first, which delays nothing
    await engine.start()
    found: dict[Any, list[Seconds]] = {added: [], merged: []}
    rates: dict[Any, float] = {}
    try:
        async with answering(engine, arguments.answers, settings.engine.context - PROMPT):
            for how, taken in found.items():
                for _ in range(1 + arguments.updates):
                    taken.append(await update(publisher, engine, puller, how))
                rates[how] = await rate(engine, arguments.seconds)
    finally:
        await engine.close()
        await puller.close()
    why = f"{publisher.weights / 1e6:.1f}M weights, rank {arguments.rank}, {size} bytes of a version"
    for part in ("update", "without a token"):
        ours, peer = (statistics.median(one[part] for one in found[how][1:]) for how in (added, merged))
        report.add(part, ours, peer, unit="s", less_is_better=True, reason=why)
    report.add("sampling", rates[added], rates[merged], unit="tokens/s", reason=why)


def read_arguments() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--model", help="a folder or .gguf file; default: a small random one")
    made.add_argument("--python", default="python3", help="the interpreter that has vLLM")
    made.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of trainer and engine")
    made.add_argument("--device", default="auto")
    made.add_argument("--rank", type=int, default=16)
    made.add_argument("--rate", type=float, default=1e-3, help="the size of a step of a weight of the adapter")
    made.add_argument("--updates", type=int, help="of each kind; default 20, with --quick 5")
    made.add_argument("--answers", type=int, help="sampled all the time; default 64, with --quick 8")
    made.add_argument("--seconds", type=float, help="of sampling between updates; default 20, with --quick 5")
    given = made.parse_args()
    given.updates = given.updates or (5 if given.quick else 20)
    given.answers = given.answers if given.answers is not None else (8 if given.quick else 64)
    given.seconds = given.seconds or (5.0 if given.quick else 20.0)
    return given


def main() -> None:
    arguments = read_arguments()
    report = Report("adapters_update")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        engine = {
            "kind": "vllm",
            "dtype": arguments.dtype,
            "device": arguments.device,
            "slots": max(8, arguments.answers),
            "server": {"python": arguments.python, "adapters": "native"},
        }
        lora = {"rank": arguments.rank, "alpha": 2.0 * arguments.rank}
        settings = PolicyConfig.model_validate(
            {
                "model": model_of(arguments.model, folder / "model", arguments.quick),
                "engine": engine,
                "trainer": {"dtype": arguments.dtype, "device": arguments.device, "lora": lora},
            }
        )
        asyncio.run(measure(settings, arguments, folder / "weights", report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
