"""One rank of `test_shard_publication.py`: what ranks publish together, beside what one rank publishes of the same."""

from __future__ import annotations

from pathlib import Path

import torch
from sharded_rank import CPU, model_of

from rillflow.config import PolicyConfig, TrainerConfig
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.graph.worker import Prober
from rillflow.trainer.learner import Learner
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Peers
from rillflow.trainer.parallel.distributed import connect
from rillflow.trainer.parallel.launch import Place
from rillflow.trainer.parallel.sharding import shard
from rillflow.trainer.publisher import Retention
from rillflow.trainer.shard_publisher import ShardPublisher
from rillflow.weights import FolderStore
from rillflow.weights.manifest import key_of

VERSIONS = 7
EVERY = 3
KEY = key_of("token")


def publish(folder: Path, peers: Peers, dtype: torch.dtype, *, tied: bool) -> None:
    model = model_of(tied=tied)
    config = TrainerConfig(sharding="fsdp", lr=1e-4)
    shard(model, config, peers, CPU)
    optimizer = Optimizer(model, config, peers)
    settings = PolicyConfig.model_validate({"model": "tiny", "engine": {"dtype": "bf16" if tied else "fp32"}})
    prober = Prober(Learner("actor", model, PolicyForward(model, config), optimizer, config, peers), settings)
    together, alone = FolderStore(folder / "together", KEY, fingerprints=True, snapshot_every=EVERY), None
    publisher = ShardPublisher(together, dtype, peers, Retention(keep=100))
    if peers.rank == 0:
        alone = FolderStore(folder / "alone", KEY, deltas=True, snapshot_every=EVERY)
    for version in range(VERSIONS):
        parent = version - 1 if version else None
        weights, probe = optimizer.weights(dtype), prober()
        if alone is not None:
            alone.publish(weights, version, parent)
        publisher.take_shards(optimizer.shards(dtype), probe)
        with torch.no_grad():
            before = [p.to_local().clone() for p in model.parameters()]
            for parameter in model.parameters():
                parameter.zero_()  # training meanwhile does not change the taken weights
        publisher.begin(version, parent)
        publisher.finish()
        with torch.no_grad():
            for parameter, held in zip(model.parameters(), before, strict=True):
                parameter.to_local().copy_(held)
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * version + number))
            parameter.grad = torch.distributed.tensor.distribute_tensor(noise, parameter.device_mesh, [_rows()])
        optimizer.update(1.0)
        optimizer.zero()


def _rows() -> torch.distributed.tensor.Shard:
    return torch.distributed.tensor.Shard(0)


def main(rank: int, ranks: int, rendezvous: str, folder: str) -> None:
    torch.set_num_threads(1)
    with connect(Place(rank, ranks, rendezvous), CPU) as peers:
        publish(Path(folder) / "tied", peers, torch.bfloat16, tied=True)
        publish(Path(folder) / "untied", peers, torch.float32, tied=False)
