"""Nodes that are 1, 5 and 30 versions behind reach the newest: bytes and seconds, beside AstraFlow's rule.

A bf16 model is trained with AdamW (fp32 masters) and every version is published, by our store and as AstraFlow does it
(`bench.delta_formats.astraflow`): a delta from exactly the previous version, everything for anyone else. The nodes are
real: an embedded engine that samples, and the puller that follows the store for it. Their seconds are from the look at
the line until the engine serves the newest version: read, verify, decode, host copy, engine. AstraFlow's are those of
reading its file and writing it into a host copy and a model: its check sums and its transport are not counted.

`python -m bench.catch_up [--quick] [--json FILE]`
"""

from __future__ import annotations

import asyncio
import copy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.common import Report, parser
from bench.delta_formats import astraflow
from rillflow.config import TrainerConfig
from rillflow.engine.embedded import EmbeddedEngine
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Alone
from rillflow.types import GenerateRequest, Sampling
from rillflow.weights.pull import Puller
from rillflow.weights.refresh import Refresher
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import FolderSource

BEHIND = (30, 5, 1)
UNSEEN = 2
WARM = 10  # steps until Adam's moments are those of a run
SNAPSHOT_EVERY = 20
VOCABULARY = 4096
LINK = 100e6 / 8  # bytes a second of a narrow link, for the seconds on paper

Weights = dict[str, torch.Tensor]


def build(quick: bool) -> Any:
    torch.manual_seed(0)
    width, layers = (128, 4) if quick else (256, 6)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def versions(model: Any, rate: float) -> Iterator[Weights]:
    """bf16 copies of the masters, from version 0 on. The loss is a policy gradient's, on tokens drawn at random."""
    optimizer = Optimizer(model, TrainerConfig(lr=rate, dtype="fp32"), Alone())
    source = torch.Generator().manual_seed(1)
    for step in range(WARM + max(BEHIND) + 1):
        if step >= WARM:
            yield {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
        optimizer.zero()
        tokens_BT = torch.randint(VOCABULARY, (4, 33), generator=source)
        advantage_B = torch.randn(4, generator=source)
        logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits.float()
        entropy_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), tokens_BT[:, 1:], reduction="none")
        (entropy_BT.mean(1) * advantage_B).mean().backward()
        optimizer.update(1.0)


class Node:
    """An engine, and what keeps it on the newest weights."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.engine = EmbeddedEngine(copy.deepcopy(model).to(torch.bfloat16), version=-1, slots=4, context=128)
        self.refresher = Refresher("p", self.engine, Puller(FolderSource(folder)))

    async def start(self) -> None:
        await self.engine.start()
        assert await self.refresher.refresh()

    async def catch_up(self) -> float:
        """The seconds until it serves the newest version; it samples meanwhile."""
        sampling = asyncio.create_task(self._sample())
        began = time.perf_counter()
        assert await self.refresher.refresh()
        took = time.perf_counter() - began
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await self.engine.close()
        return took

    async def _sample(self) -> None:
        while True:
            asked = GenerateRequest(id="r", tokens=[1, 2, 3], sampling=Sampling(max_tokens=100))
            async for _ in self.engine.generate(asked):
                pass


def bits(weights: Weights) -> dict[str, np.ndarray]:
    """Tied weights once."""
    own = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(weights.items())}
    return {name: tensor.reshape(-1).view(torch.int16).numpy().view(np.uint16) for name, tensor in own.values()}


class AstraFlow:
    """Its sender's files of one version, and its receiver."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._delta, self._full = folder / "delta", folder / "full"
        self._last: dict[str, np.ndarray] = {}
        self._before: dict[str, np.ndarray] = {}

    def publish(self, weights: Weights) -> None:
        self._before, self._last = self._last, {name: array.copy() for name, array in bits(weights).items()}

    def bytes(self, behind: int) -> int:
        """Return the files that a node this far behind must fetch."""
        if behind == 1:
            self._delta.write_bytes(astraflow.encode(self._before, self._last))
            return self._delta.stat().st_size
        self._full.write_bytes(b"".join(array.tobytes() for array in self._last.values()))
        return self._full.stat().st_size

    def seconds(self, behind: int) -> float:
        held = {name: array.copy() for name, array in self._before.items()}
        model = {name: torch.from_numpy(array.view(np.int16)).clone() for name, array in held.items()}
        began = time.perf_counter()
        if behind == 1:
            astraflow.apply(held, self._delta.read_bytes())
        else:
            data, at = np.frombuffer(self._full.read_bytes(), np.uint16), 0
            for array in held.values():
                array[:] = data[at : at + array.size]
                at += array.size
        for name, array in held.items():
            model[name].copy_(torch.from_numpy(array.view(np.int16)))
        took = time.perf_counter() - began
        assert all(np.array_equal(array, self._last[name]) for name, array in held.items())
        return took


async def measure(report: Report, rate: float, quick: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = Path(name) / "ours", AstraFlow(Path(name) / "theirs")
        store = FolderStore(ours, deltas=True, snapshot_every=SNAPSHOT_EVERY)
        model = build(quick)
        nodes: dict[int, Node] = {}
        for version, weights in enumerate(versions(model, rate)):
            published = store.publish(weights, version, version - 1 if version else None)
            theirs.publish(weights)
            print(f"lr {rate:g} version {version}: {published.changed:.2%} changed", file=sys.stderr)
            if (behind := max(BEHIND) - version) in {*BEHIND, UNSEEN}:
                nodes[behind] = Node(model, ours)
                await nodes[behind].start()
        await nodes.pop(UNSEEN).catch_up()  # from here on nothing is compiled or loaded for the first time
        for behind, node in sorted(nodes.items()):
            await show(report, f"lr {rate:g}, {behind} behind", node, theirs, behind)


async def show(report: Report, what: str, node: Node, theirs: AstraFlow, behind: int) -> None:
    took = await node.catch_up()
    transfer = node.refresher.transfers.last[-1]
    size, their_seconds = theirs.bytes(behind), theirs.seconds(behind)
    report.add(f"{what}: fetched", transfer.bytes / 1e6, size / 1e6, unit="MB", goal=1.0, less_is_better=True)
    print(f"{what}: {transfer}", file=sys.stderr)
    report.add(f"{what}: here", took, their_seconds, unit="s", less_is_better=True)
    report.add(f"{what}: without a token", transfer.pause, None, unit="s", reason="not measured there")
    paper = (transfer.bytes / LINK + took, size / LINK + their_seconds)
    report.add(f"{what}: at 100 Mbit/s, on paper", *paper, unit="s", less_is_better=True)


def main() -> None:
    arguments = parser(str(__doc__)).parse_args()
    torch.set_num_threads(1)
    report = Report("catch_up")
    for rate in (1e-6,) if arguments.quick else (1e-6, 5e-6):
        asyncio.run(measure(report, rate, arguments.quick))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
