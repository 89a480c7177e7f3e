"""The collectives of a trainer on a GPU: NCCL for tensors, gloo for messages. One GPU can hold one rank of NCCL."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from sharded_rank import assert_near, loss_of, model_of, tokens_of
from torch.distributed.tensor import DTensor

from rillflow.config import TrainerConfig
from rillflow.trainer.parallel import Peers
from rillflow.trainer.parallel.distributed import together
from rillflow.trainer.parallel.launch import Place
from rillflow.trainer.parallel.sharding import entered, shard, whole

pytestmark = pytest.mark.needs("cuda")


@pytest.fixture
def peers() -> Iterator[Peers]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with together(Place(0, 1, f"127.0.0.1:{port}"), torch.device("cuda", 0), start=60, patience=60) as connected:
        yield connected


def test_tensors_of_the_gpu_go_over_nccl(peers: Peers) -> None:
    assert "cuda:nccl" in str(dist.get_backend_config())
    tensors = [torch.arange(5.0, device="cuda"), torch.ones(3, 2, dtype=torch.bfloat16, device="cuda")]
    peers.add(tensors)
    assert [float(tensor.float().sum()) for tensor in tensors] == [10.0, 6.0]
    assert peers.everyone(b"here") == [b"here"]
    assert peers.total([1.5]) == [1.5]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_sharded_model_has_the_losses_and_gradients_of_the_whole(peers: Peers, dtype: str) -> None:
    plain, sharded = model_of().cuda(), model_of().cuda()
    shard(sharded, TrainerConfig(sharding="fsdp", dtype=dtype), peers, torch.device("cuda", 0))
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    tokens = tokens_of(0, 0).cuda()
    got = entered(sharded, lambda given: loss_of(sharded, given))(tokens)
    expected = loss_of(plain, tokens)
    # Seven tokens' log-probs of about 4 nats each, computed from bf16 weights: 8 bits of mantissa.
    torch.testing.assert_close(got, expected, rtol=1e-5 if dtype == "fp32" else 0.03, atol=1e-5)
    got.backward()
    expected.backward()
    for name, parameter in sharded.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        if dtype == "fp32":
            assert_near(whole(parameter.grad, torch.float32).cuda(), dict(plain.named_parameters())[name].grad)
