"""Host memory of two ranks that load a sharded model and publish it, at its peak.

A Qwen3-shaped model with random weights is written in bf16. Two real ranks (gloo) load it as a trainer does, sharded by
FSDP2, and publish it once in bf16. Each samples its anonymous memory (without mapped files, which the system may drop)
above what it had before the load. On a CPU the fp32 masters lie in that memory too, all the time: 2 bf16 copies in all,
which a GPU would hold. The peer is the former way: every rank loads the whole model and keeps all that it gathers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
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
from rillflow.trainer.parallel.distributed import connect
from rillflow.trainer.parallel.launch import Place, launch
from rillflow.trainer.roles import Roles
from rillflow.weights import FolderStore

_RANKS = 2
_EVERY = 0.002  # seconds between two samples
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


class Peak:
    """The highest anonymous memory of this process, above `before`, while it is entered."""

    def __init__(self, before: int) -> None:
        self._before = before
        self.bytes = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_EVERY):
                self.bytes = max(self.bytes, anonymous() - self._before)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.bytes = max(self.bytes, anonymous() - self._before)


def run_rank(model: Path, place: Place, *, former: bool) -> dict[str, int]:
    settings = PolicyConfig(
        model=str(model), trainer=TrainerConfig(dtype="bf16", sharding="fsdp", ranks=place.ranks, device="cpu")
    )
    with connect(place, _CPU) as peers, ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        if former:
            stack.enter_context(patch.object(roles, "load_shards", lambda *_: None))
        peers.agree(None)
        before = anonymous()
        peak = {"load": Peak(before), "publish": Peak(before)}
        with peak["load"].watching():
            made = Roles(settings, peers, _CPU, 0, False)
            peers.agree(None)
        optimizer = Optimizer(made._policy, settings.trainer, peers)
        with peak["publish"].watching():
            weights = optimizer.weights(torch.bfloat16, here=former or peers.rank == 0)
            if peers.rank == 0:
                FolderStore(Path(folder)).publish(weights, 0, parent=None)
            peers.agree(None)
        del weights
    return {name: one.bytes for name, one in peak.items()}


def measure(model: Path, *, former: bool) -> dict[str, int]:
    """Return the sums over the ranks."""
    with tempfile.TemporaryDirectory() as name:
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
    model = Qwen3ForCausalLM(Qwen3Config(**{"tie_word_embeddings": True, **_SIZES[size]})).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--size", choices=sorted(_SIZES), help="default 0.6b, with --quick 0.1b")
    for name in ("--rank-of", "--out", "--rendezvous"):
        made.add_argument(name, help=argparse.SUPPRESS)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--former", action="store_true", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.rank_of:
        place = Place(arguments.rank, _RANKS, arguments.rendezvous)
        told = run_rank(Path(arguments.rank_of), place, former=arguments.former)
        (Path(arguments.out) / f"{arguments.rank}.json").write_text(json.dumps(told))
        return
    size, report = arguments.size or ("0.1b" if arguments.quick else "0.6b"), Report("memory")
    with tempfile.TemporaryDirectory() as folder:
        copy = write_model(size, Path(folder))
        ours, former = (measure(Path(folder), former=way) for way in (False, True))
    for name in ours:
        report.add(
            f"{size}, {name}: peak of {_RANKS} ranks together, in bf16 copies", ours[name] / copy, former[name] / copy,
            unit="copies", less_is_better=True,
        )  # fmt: skip
    report.finish(arguments.json, copy_bytes=copy)


if __name__ == "__main__":
    main()
