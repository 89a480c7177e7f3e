"""The TransferQueue side of `bench.dataflow`, run under its own Python: one line of JSON in, one out, until the end.

Requests: `{"case": NAME, …numbers}`; replies: seconds by name, with core seconds beside, or `{"error": …}`. It is the
package's default backend (SimpleStorage, two units, in memory) on a local Ray. Data is made before the clock starts, as
on our side. Nothing it stores is on disk.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

import ray
import torch
import transfer_queue as tq
from cores import Moment
from tensordict import TensorDict

COLUMNS = {
    "tokens": torch.int32,
    "mask": torch.uint8,
    "logprobs": torch.float32,
    "raw_logprobs": torch.float32,
    "temperatures": torch.float32,
    "versions": torch.int32,
}
_rounds = itertools.count()


def partition(name: str) -> str:
    """A fresh partition for every round."""
    return f"{name}{next(_rounds)}"


def trajectories(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.ones(length, dtype=dtype) for name, dtype in COLUMNS.items()} for length in lengths]


def stacked(rows: list[dict[str, torch.Tensor]]) -> TensorDict:
    """Many rows at once are nested tensors, as its users pass them."""
    columns = {
        name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged) for name in COLUMNS
    }
    return TensorDict(columns, batch_size=len(rows))


# ---------------------------------------------------------------- (a) one large rectangle


def rectangle(rows: int, columns: int, width: int) -> dict[str, float]:
    data = TensorDict({f"c{n}": torch.rand(rows, width) for n in range(columns)}, batch_size=rows)
    where, keys = partition("a"), [str(n) for n in range(rows)]
    began = Moment.now()
    tq.kv_batch_put(keys=keys, partition_id=where, fields=data)
    put = began.passed("put")
    began = Moment.now()
    got = tq.kv_batch_get(keys=keys, partition_id=where)
    get = began.passed("get")
    assert torch.equal(got["c0"][rows - 1], data["c0"][rows - 1])
    tq.kv_clear(keys=keys, partition_id=where)
    return put | get


# ---------------------------------------------------------------- (b) ragged rows, from one producer


def ragged(lengths: list[int], single: int, batch: int) -> dict[str, float]:
    rows = trajectories(lengths)
    where, keys = partition("b"), [str(n) for n in range(len(rows))]
    began = Moment.now()
    for key, row in zip(keys[:single], rows, strict=False):
        tq.kv_put(key=key, partition_id=where, fields=row)
    found = began.passed("put", single)
    at_once = single + len(rows) // 4
    began = Moment.now()
    asyncio.run(produce(rows[single:at_once], single, where, 64))
    found |= began.passed("put_many", at_once - single)
    parts = [slice(at, at + batch) for at in range(at_once, len(rows), batch)]
    made = [stacked(rows[part]) for part in parts]
    began = Moment.now()
    for part, data in zip(parts, made, strict=True):
        tq.kv_batch_put(keys=keys[part], partition_id=where, fields=data)
    found |= began.passed("put_batched", len(rows) - at_once)
    began = Moment.now()
    for at in range(0, len(rows), batch):
        tq.kv_batch_get(keys=keys[at : at + batch], partition_id=where)
    found |= began.passed("get", len(rows))
    tq.kv_clear(keys=keys, partition_id=where)
    return found


# ---------------------------------------------------------------- (c) many producers, many consumers


# Coroutines stand outside of the actors: a class with one becomes an async actor, in which `tq.init` cannot wait.


async def produce(rows: list[dict[str, torch.Tensor]], first: int, where: str, count: int) -> None:
    """`count` producers, each putting its rows one after the other."""

    async def one(mine: range) -> None:
        for n in mine:
            await tq.async_kv_put(key=str(first + n), partition_id=where, fields=rows[n])

    await asyncio.gather(*(one(range(k, len(rows), count)) for k in range(count)))


def consume(where: str, count: int, micro: int, total: int) -> int:
    """`count` consumers that share the task's name: each row is consumed once. Threads: its async calls hang here."""
    client, seen = tq.get_client(), []

    def one(_: int) -> None:
        while sum(seen) < total:
            meta = client.get_meta(
                data_fields=list(COLUMNS), batch_size=micro, partition_id=where, mode="fetch", task_name="update"
            )
            if meta.size:
                seen.append(len(client.get_data(meta)))
            else:
                time.sleep(0.002)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(one, range(count)))
    return sum(seen)


@ray.remote(num_cpus=0)
class Producers:
    def __init__(self, lengths: list[int], first: int) -> None:
        tq.init()
        self._rows = trajectories(lengths)
        self._first = first

    def run(self, where: str, count: int) -> None:
        asyncio.run(produce(self._rows, self._first, where, count))


@ray.remote(num_cpus=0)
class Consumers:
    def __init__(self) -> None:
        tq.init()

    def run(self, where: str, count: int, micro: int, total: int) -> int:
        return consume(where, count, micro, total)


def streaming(
    lengths: list[int], producers: int, producer_processes: int, consumers: int, micro: int
) -> dict[str, float]:
    where, share = partition("c"), len(lengths) // producer_processes
    makers = [Producers.remote(lengths[n * share : (n + 1) * share], n * share) for n in range(producer_processes)]
    eaters = Consumers.remote()
    ray.get([maker.__ray_ready__.remote() for maker in (*makers, eaters)])
    began = Moment.now()
    eating = eaters.run.remote(where, consumers, micro, len(lengths))
    making = [maker.run.remote(where, producers // producer_processes) for maker in makers]
    ray.get(making)
    consumed = ray.get(eating)
    spent = began.passed("stream", consumed)
    for actor in (*makers, eaters):
        ray.kill(actor)
    return spent


CASES: dict[str, Callable[..., dict[str, float]]] = {"a": rectangle, "b": ragged, "c": streaming}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")  # libraries print to stdout
    os.dup2(2, 1)
    # Its actors ask for more CPUs than a small machine has; Ray only counts them.
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, configure_logging=False)
    tq.init({"controller": {"polling_mode": True}})
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        try:
            reply: dict[str, Any] = CASES[request.pop("case")](**request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(reply), file=replies, flush=True)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
