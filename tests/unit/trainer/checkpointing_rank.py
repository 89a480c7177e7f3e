"""One rank of `test_checkpoint_ranks.py`: saves sharded tensors with others, or finds its part of what was saved."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rillflow.trainer.checkpoint import Checkpoints, State
from rillflow.trainer.parallel.distributed import connect
from rillflow.trainer.parallel.launch import Place


def main(rank: int, ranks: int, rendezvous: str, folder: str, task: str) -> None:
    with connect(Place(rank, ranks, rendezvous), torch.device("cpu")) as peers:
        mesh = init_device_mesh("cpu", (ranks,))
        whole = {"w": torch.arange(21.0).reshape(7, 3), "b": torch.arange(2.0)}
        masters = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
        moments = {f"exp_avg/{name}": tensor * 2 for name, tensor in masters.items()}
        checkpoints = Checkpoints(Path(folder), 2, peers, deadline=60.0)
        if task == "save":
            state = State(version=1, step=1, recipe="", random={})
            checkpoints.save(state, masters, moments | {"step/w": torch.tensor(3.0)})
            return
        found = checkpoints.latest_valid(masters)
        assert found is not None
        for name, tensor in masters.items():
            assert torch.equal(found.masters[name], tensor.to_local()), name
            assert torch.equal(found.moments[f"exp_avg/{name}"], 2 * tensor.to_local()), name
