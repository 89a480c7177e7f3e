"""Host memory of two ranks that load a sharded model and publish it, at its peak.

A Qwen3-shaped model with random weights is written in bf16. Two real ranks (gloo) load it as a trainer does, sharded by
FSDP2, and publish a whole version, a delta, and a delta with a whole version. A hundredth of the weights changes from
one to the next. Each rank samples its anonymous memory (without mapped files, which the system may drop) above what it
had before the load; the compiled loops of deltas were loaded by then.

On a CPU the fp32 masters lie in that memory, 2 bf16 copies in all, and so does the ranks' copy of the last version,
another one. A GPU would hold both. The rows are above the masters. The peer is the former way: every rank loads the
whole model, and rank 0 gathers and publishes it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.common import Report, parser
from bench.trainer import SHAPES
from rillflow.config import PolicyConfig, TrainerConfig
from rillflow.trainer import roles
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Peers
from rillflow.trainer.parallel.distributed import connect
from rillflow.trainer.parallel.launch import Place, launch
from rillflow.trainer.shard_publisher import ShardPublisher
from rillflow.weights import FolderStore
from rillflow.weights.delta import Ahead

_RANKS = 2
_EVERY = 0.002  # seconds between two samples
_CHANGED = 100  # every hundredth weight changes from version to version
_SNAPSHOT_EVERY = 2
_MASTERS = 2  # bf16 copies that the fp32 masters are
_LIMIT = 1.3  # bf16 copies
_SIZES = {
    **SHAPES,
    "0.1b": {**SHAPES["0.6b"], "num_hidden_layers": 4, "vocab_size": 32_768},
}
_CPU = torch.device("cpu")


def anonymous() -> int:
    """Return the bytes of this process's anonymous memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this system does not tell a process's anonymous memory")


class Watch:
    """Anonymous memory above what there was at the beginning: `peaks` while something was done, `stays` afterwards."""

    def __init__(self) -> None:
        self._before = anonymous()
        self.told: dict[str, int] = {}

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        done, seen = threading.Event(), [0]

        def watch() -> None:
            while not done.wait(_EVERY):
                seen.append(max(seen.pop(), anonymous() - self._before))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        stays = anonymous() - self._before
        self.told |= {f"{what}: peak": max(seen[0], stays), f"{what}: afterwards": stays}


def run_rank(model: Path, folder: Path, place: Place, *, former: bool) -> dict[str, int]:
    settings = PolicyConfig(
        model=str(model), trainer=TrainerConfig(dtype="bf16", sharding="fsdp", ranks=place.ranks, device="cpu")
    )
    assert Ahead(torch.bfloat16, _CPU).wait(600.0)
    with connect(place, _CPU) as peers, ExitStack() as stack:
        if former:
            stack.enter_context(patch.object(roles, "load_shards", lambda *_: None))
        peers.agree(None)
        watch = Watch()
        with watch.doing("load"):
            made = roles.Roles(settings, peers, _CPU, 0, False)
            peers.agree(None)
        optimizer = Optimizer(made._policy, settings.trainer, peers)
        store = FolderStore(folder, deltas=former, fingerprints=True, snapshot_every=_SNAPSHOT_EVERY)
        publishing = gathered(optimizer, store, peers) if former else sharded(optimizer, store, peers)
        for version, kind in enumerate(("publish whole", "publish a delta", "publish both")):
            with watch.doing(kind):
                publishing(version, version - 1 if version else None)
                peers.agree(None)
            change(optimizer)
    return watch.told


def sharded(optimizer: Optimizer, store: FolderStore, peers: Peers) -> Callable[[int, int | None], None]:
    publisher = ShardPublisher(store, torch.bfloat16, peers)

    def publish(version: int, parent: int | None) -> None:
        publisher.take_shards(optimizer.shards(torch.bfloat16))
        publisher.begin(version, parent)
        publisher.finish()

    return publish


def gathered(optimizer: Optimizer, store: FolderStore, peers: Peers) -> Callable[[int, int | None], None]:
    def publish(version: int, parent: int | None) -> None:
        weights = optimizer.weights(torch.bfloat16, here=peers.rank == 0)
        if peers.rank == 0:
            store.publish(weights, version, parent)

    return publish


@torch.no_grad()
def change(optimizer: Optimizer) -> None:
    for master in optimizer._masters.values():
        master.view(-1)[::_CHANGED].mul_(1.01)


def measure(model: Path, *, former: bool) -> dict[str, int]:
    """Return the sums over the ranks."""
    with tempfile.TemporaryDirectory(dir=model.parent) as name:
        folder = Path(name)
        words = [sys.executable, "-m", "bench.memory", "--rank-of", str(model), "--out", name]
        words += ["--former"] if former else []
        code = launch(
            lambda rank, at: [*words, "--rank", str(rank), "--rendezvous", at],
            _RANKS,
            os.environ,
            lambda rank: folder / f"rank{rank}.log",
        )
        if code:
            raise RuntimeError("".join(path.read_text() for path in folder.glob("*.log")))
        told = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {name: sum(one[name] for one in told) for name in told[0]}


def write_model(size: str, folder: Path) -> int:
    """Write the model; return the bytes of its bf16 weights."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM(Qwen3Config(**{"tie_word_embeddings": True, **_SIZES[size]}))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--size", choices=sorted(_SIZES), help="default 1.7b, with --quick 0.1b")
    made.add_argument("--no-peer", action="store_true", help="only ours: the peer takes twice the memory")
    for name in ("--rank-of", "--out", "--rendezvous"):
        made.add_argument(name, help=argparse.SUPPRESS)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--former", action="store_true", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.rank_of:
        place, out = Place(arguments.rank, _RANKS, arguments.rendezvous), Path(arguments.out)
        told = run_rank(Path(arguments.rank_of), out / "store", place, former=arguments.former)
        (out / f"{arguments.rank}.json").write_text(json.dumps(told))
        return
    size, report = arguments.size or ("0.1b" if arguments.quick else "1.7b"), Report("memory")
    with tempfile.TemporaryDirectory() as folder:
        copy = write_model(size, Path(folder))
        ours = measure(Path(folder), former=False)
        peer = {} if arguments.no_peer else measure(Path(folder), former=True)
    above = [{name: size / copy - _MASTERS for name, size in found.items()} for found in (ours, peer)]
    for name, copies in above[0].items():
        report.add(
            f"{size}, {name}, above the masters", copies, above[1].get(name), unit="copies", less_is_better=True,
            limit=_LIMIT, reason="" if peer else "--no-peer",
        )  # fmt: skip
    report.finish(arguments.json, copy_bytes=copy, masters_copies=_MASTERS, bytes=ours)


if __name__ == "__main__":
    main()
