"""The processes of `bench.cross_region`: a trainer that publishes, and pools that sample and follow it.

`python -m bench.cross_region_parts train|pool|pull ARGUMENTS`, the arguments as one JSON object; each writes one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rillflow.config import PolicyConfig
from rillflow.config.policy import EngineConfig, WeightsConfig
from rillflow.contracts import Engine
from rillflow.engine.build import build_engine, follow
from rillflow.trainer.publisher import Publisher, Retention
from rillflow.types import GenerateRequest, Sampling
from rillflow.weights import delta
from rillflow.weights.manifest import key_of
from rillflow.weights.pull import Puller
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import open_source
from rillflow.wire.tokens import scoped_token

POLICY = "policy"
TOKEN = "the token of a benchmark"
NODE_TOKEN = scoped_token(TOKEN, "node")
PROMPT, ANSWER, CONTEXT, STREAMS = 32, 96, 256, 2
_LOOK = 0.2
THINK = 0.1  # seconds between two answers, as an agent has them; many pools share this machine


def make_model(folder: Path, width: int, layers: int) -> int:
    """A random model in bf16; returns its bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in model.state_dict().values())


# -------------------------------------------------------------------- the trainer


class Train(NamedTuple):
    root: str
    steps: int
    period: float  # seconds from one publication to the next, as a larger model's step would take
    deltas: bool
    rate: float


def train(ask: Train) -> dict[str, Any]:
    """AdamW on fp32 masters, a bf16 copy published after every step, written while the next step computes."""
    from transformers import LlamaForCausalLM

    root = Path(ask.root)
    model = LlamaForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ask.rate)
    store = FolderStore(root / "weights" / POLICY, key_of(NODE_TOKEN), deltas=ask.deltas, snapshot_every=10**6)
    store.publish(_published(model), 0, None)
    publisher = Publisher(store, torch.bfloat16, Retention(keep=10**6))
    (root / "ready").touch()
    while not (root / "go").exists():
        time.sleep(_LOOK)
    steps = []
    for version in range(1, ask.steps + 1):
        begun = time.perf_counter()
        tokens = torch.randint(0, model.config.vocab_size, (2, 48))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        computed = time.perf_counter()
        publisher.finish()  # the publication before this one: the only wait that a trainer has
        waited = time.perf_counter()
        publisher.take(_published(model))
        publisher.begin(version, version - 1)
        taken = time.perf_counter()
        steps.append({"compute": computed - begun, "wait": waited - computed, "copy": taken - waited})
        time.sleep(max(0.0, ask.period - (taken - begun)))
        steps[-1] |= publisher.statistics()
    publisher.finish()
    entries = store.line().entries
    publisher.close()
    sizes = [entry.delta_bytes for version, entry in entries.items() if version]
    return {"steps": steps, "full_bytes": entries[0].full_bytes, "delta_bytes": statistics.mean(sizes)}


def _published(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}


# -------------------------------------------------------------------- a pool


class Pool(NamedTuple):
    root: str
    name: str
    source: str  # empty: the store's own folder
    mode: str
    think: float = THINK


class _Token(NamedTuple):
    at: float
    version: int


async def pool(ask: Pool) -> dict[str, Any]:
    """An engine that samples all the time and follows the line; until the trainer has ended and the head is reached."""
    root = Path(ask.root)
    settings = PolicyConfig(
        model=str(root / "model"),
        # The attention cache is kept at an update: computing it again is work of the engine, not of the weights' way.
        engine=EngineConfig(dtype="bf16", slots=4, context=CONTEXT, device="cpu", on_update="keep"),
        weights=WeightsConfig.model_validate({"mode": ask.mode, "source": ask.source or None}),
    )
    engine = build_engine(settings, exact=False)
    refresher = follow(POLICY, settings, engine, name=ask.name, weights=root / "weights", token=NODE_TOKEN)
    head = FolderStore(root / "weights" / POLICY).head
    answers: list[list[_Token]] = []
    lags: list[int] = []
    _warm()
    await engine.start()
    tasks = [asyncio.create_task(_sample(engine, answers, seed, ask.think)) for seed in range(STREAMS)]
    tasks.append(asyncio.create_task(refresher.run(0.05)))
    (root / f"ready-{ask.name}").touch()
    try:
        while not ((root / "stop").exists() and engine.version == head()):
            await asyncio.sleep(_LOOK)
            lags.append((head() or 0) - engine.version)
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await refresher.close()
        await engine.close()
    transfers = [transfer._asdict() for transfer in refresher.transfers.last]
    return {"transfers": transfers, "lag": statistics.mean(lags), **_gaps(answers)}


def _warm() -> None:
    """Load the compiled code of the codec, as every process does once."""
    base = torch.randn(5000).to(torch.bfloat16)
    new = torch.where(torch.arange(5000) % 40 == 0, base * 1.01, base)
    delta.decode(base, delta.encode(base, new).data)


async def _sample(engine: Engine, answers: list[list[_Token]], seed: int, think: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = 0
    while True:
        tokens = torch.randint(0, 4096, (PROMPT,), generator=generator).tolist()
        request = GenerateRequest(id=f"{seed}-{count}", tokens=tokens, sampling=Sampling(max_tokens=ANSWER))
        answers.append([])
        async for chunk in engine.generate(request):
            answers[-1].append(_Token(time.perf_counter(), chunk.version))
        count += 1
        await asyncio.sleep(think)


def _gaps(answers: list[list[_Token]]) -> dict[str, Any]:
    """Seconds between two tokens of an answer: ordinary ones, and those between two versions, by the newer one."""
    ordinary: list[float] = []
    seams: dict[int, list[float]] = {}
    for answer in answers:
        for before, after in pairwise(answer):
            gap = after.at - before.at
            if before.version == after.version:
                ordinary.append(gap)
            else:
                seams.setdefault(after.version, []).append(gap)
    usual = statistics.mean(ordinary)  # tokens are handed out several at a time
    ordered = sorted(ordinary)
    return {
        "tokens": len(ordinary),
        "usual_gap": usual,
        "p99_gap": ordered[int(0.99 * len(ordered))],
        "seams": {str(version): statistics.median(gaps) - usual for version, gaps in seams.items()},
    }


# -------------------------------------------------------------------- a pull alone


class Pull(NamedTuple):
    root: str
    name: str
    source: str
    mode: str


async def pull(ask: Pull) -> dict[str, Any]:
    """A new node that takes the head, without an engine."""
    root = Path(ask.root)
    source = open_source(
        ask.source, POLICY, key=key_of(NODE_TOKEN), cache=root / "cache" / ask.name, streams=4, token=NODE_TOKEN
    )
    puller = Puller(source, ask.mode)  # type: ignore[arg-type]
    (root / f"ready-{ask.name}").touch()
    while not (root / "go").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    begun = time.perf_counter()
    pulled = await puller.pull()
    seconds = time.perf_counter() - begun
    await puller.close()
    return {"seconds": seconds, "transfer": pulled.transfer._asdict()}


def main() -> None:
    torch.set_num_threads(1)
    kind, arguments, result = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    if kind == "train":
        found = train(Train(**arguments))
    elif kind == "pool":
        found = asyncio.run(pool(Pool(**arguments)))
    else:
        found = asyncio.run(pull(Pull(**arguments)))
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
