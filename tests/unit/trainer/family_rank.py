"""One rank of `models_page.py`: every family sharded over the ranks, compared with the same model whole."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from model_families import FAMILIES, Outcome, alone, assert_scores, build, random_rows
from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.packing import micro_batches
from rillflow.trainer.parallel import Peers
from rillflow.trainer.parallel.distributed import connect
from rillflow.trainer.parallel.launch import Place
from rillflow.trainer.parallel.sharding import shard, whole

CPU = torch.device("cpu")


def main(rank: int, ranks: int, rendezvous: str, outcomes: str) -> None:
    with connect(Place(rank, ranks, rendezvous), CPU) as peers:
        found = {family: sharded(family, peers) for family in FAMILIES}
    if rank == 0:
        Path(outcomes).write_text(json.dumps(found))


def sharded(family: str, peers: Peers) -> Outcome:
    config, rows = TrainerConfig(sharding="fsdp", ranks=peers.size), random_rows()
    plain, model = build(family), build(family)
    expected_N = alone(plain, rows)
    try:
        shard(model, config, peers, CPU)
        forward, reference = PolicyForward(model, config), PolicyForward(plain, config)
    except ConfigError as error:
        return Outcome("refused", error.message)
    assert_scores(forward, rows, expected_N)
    for run in (forward, reference):
        for make in micro_batches(Databuffer(rows), [], 4096, device=CPU):
            run(make())[0].square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        expected = gradients[name]
        assert (parameter.grad is None) == (expected is None), name
        if parameter.grad is not None and expected is not None:
            # Every rank has the same rows, and gradients are summed over ranks.
            scale = max(float(expected.abs().max()), 1e-3)
            torch.testing.assert_close(
                whole(parameter.grad, torch.float32), peers.size * expected, rtol=0, atol=1e-4 * scale
            )
    return Outcome("exact")
