"""Host memory of two ranks that load a sharded model and publish it, at its peak.

A Qwen3-shaped model with random weights is written in bf16. Two real ranks (gloo) load it as a trainer does, sharded by
FSDP2, and publish its first version, a delta, and a delta with a whole version. Between versions a hundredth of the
weights changes. Each rank samples its anonymous memory (without mapped files, which the system may drop) above what it
had before the load.

On a CPU the fp32 masters lie in that memory too: 2 bf16 copies in all, which a GPU would hold, as it would the ranks'
copies of the last version. Rows are therefore above the masters, and say apart what stays after a publication.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.common import Report, parser
from bench.trainer import SHAPES
from rillflow.config import PolicyConfig, TrainerConfig
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Peers
from rillflow.trainer.parallel.distributed import connect
from rillflow.trainer.parallel.launch import Place, launch
from rillflow.trainer.roles import Roles
from rillflow.trainer.shard_publisher import ShardPublisher
from rillflow.weights import FolderStore
from rillflow.weights.delta import Ahead

_RANKS = 2
_EVERY = 0.002  # seconds between two samples
_CHANGED = 100  # one weight of so many changes from version to version
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
        self.told |= {f"{what}, peak": max(seen[0], stays), f"{what}, afterwards": stays}


def run_rank(model: Path, folder: Path, place: Place) -> dict[str, int]:
    settings = PolicyConfig(
        model=str(model), trainer=TrainerConfig(dtype="bf16", sharding="fsdp", ranks=place.ranks, device="cpu")
    )
    torch.set_num_threads(1)
    assert Ahead(torch.bfloat16, _CPU).wait(600.0)
    with connect(place, _CPU) as peers:
        peers.agree(None)
        watch = Watch()
        with watch.doing("load"):
            made = Roles(settings, peers, _CPU, 0, False)
            peers.agree(None)
        optimizer = Optimizer(made._policy, settings.trainer, peers)
        publish(optimizer, FolderStore(folder, fingerprints=True, snapshot_every=2), peers, watch)
    return watch.told


def publish(optimizer: Optimizer, store: FolderStore, peers: Peers, watch: Watch) -> None:
    publisher = ShardPublisher(store, torch.bfloat16, peers)
    for version, kind in enumerate(("first version", "delta", "delta and whole version")):
        with watch.doing(kind):
            publisher.take_shards(optimizer.shards(torch.bfloat16))
            publisher.publish(version, version - 1 if version else None)
            peers.agree(None)
        change(optimizer)


@torch.no_grad()
def change(optimizer: Optimizer) -> None:
    for master in optimizer._masters.values():
        master.view(-1)[::_CHANGED].mul_(1.01)


def measure(model: Path) -> dict[str, int]:
    """Return the sums over the ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [sys.executable, "-m", "bench.memory", "--rank-of", str(model), "--out", name]
        code = launch(
            lambda rank, at: [*words, "--rank", str(rank), "--rendezvous", at],
            _RANKS,
            os.environ,
            lambda rank: folder / f"rank{rank}.log",
        )
        if code:
            raise RuntimeError("".join(path.read_text() for path in folder.glob("*.log")))
        told = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    print(json.dumps(told, indent=1))
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
    for name in ("--rank-of", "--out", "--rendezvous"):
        made.add_argument(name, help=argparse.SUPPRESS)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.rank_of:
        place, out = Place(arguments.rank, _RANKS, arguments.rendezvous), Path(arguments.out)
        told = run_rank(Path(arguments.rank_of), out / "store", place)
        (out / f"{arguments.rank}.json").write_text(json.dumps(told))
        return
    size, report = arguments.size or ("0.1b" if arguments.quick else "1.7b"), Report("memory")
    with tempfile.TemporaryDirectory() as folder:
        copy = write_model(size, Path(folder))
        found = measure(Path(folder))
    for name in found:
        report.add(
            f"{size}, {name}: {_RANKS} ranks together, above the masters, in bf16 copies", found[name] / copy - 2, None,
            unit="copies", less_is_better=True,
        )  # fmt: skip
    report.finish(arguments.json, copy_bytes=copy)


if __name__ == "__main__":
    main()
