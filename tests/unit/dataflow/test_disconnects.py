"""A client that has gone takes nothing: its connection is closed while its request waits, over a real socket."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec
import pytest
from dataflow_server import TOKEN, served

from dataflow_world import POLICY
from rillflow.types import LeaseBatch, LeaseStage, LeaseTasks
from rillflow.types.routes import post

WAIT = 50.0


@asynccontextmanager
async def asked(url, path, body, *, reset=False):
    """Send a request; the connection is closed, or reset, at the end of the block, without reading the answer."""
    data = msgspec.msgpack.encode(body)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {len(data)}\r\n\r\n"
    _, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    writer.write(head.encode() + data)
    try:
        yield
    finally:
        if reset:
            linger = (1).to_bytes(4, "little") + bytes(4)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()


async def ended(run, wait):
    """Wait until no request waits for this, long before the deadline of the request."""
    async with asyncio.timeout(WAIT / 3):
        await run.waits_for(lambda waits: not any(wait in one for one in waits))


@pytest.mark.parametrize("reset", [False, True])
async def test_a_node_that_has_gone_takes_no_lease(tmp_path, reset):
    async with served(tmp_path) as run:
        await run.join()
        await run.play_all()
        batch = (await run.ask("a")).batch
        ask = LeaseTasks(node="gone", incarnation="a", want=4, versions={POLICY: 1}, wait=WAIT)
        async with asked(run.url, "/tasks/lease", ask, reset=reset):
            await run.waits_for(lambda waits: any("node gone waits" in wait for wait in waits))
        await ended(run, "node gone waits")
        await run.commit(batch, 1)  # new tasks are pending, for version 1
        assert run.ledger.nodes.held("gone") == (0, 0)
        assert run.ledger.tasks.running == 0
        assert len((await run.lease()).leases) == 4


async def test_a_trainer_that_has_gone_takes_no_batch(tmp_path):
    async with served(tmp_path) as run:
        await run.join()
        ask = LeaseBatch(policy=POLICY, incarnation="i", attempt="gone", groups=2, version=0, wait=WAIT)
        async with asked(run.url, "/batches/lease", ask):
            await run.waits_for(lambda waits: any("waits for a batch" in wait for wait in waits))
        await ended(run, "waits for a batch")
        await run.play_all()
        assert not run.ledger.batches.any_leased
        assert (await run.ask("there")).batch is not None


async def test_a_stage_worker_that_has_gone_takes_no_group(tmp_path):
    async with served(tmp_path, stages=("score",)) as run:
        await run.join()
        ask = LeaseStage(policy=POLICY, stage="score", attempt="gone", groups=9, wait=WAIT)
        async with asked(run.url, "/stages/lease", ask):
            await run.waits_for(lambda waits: any("stage score" in wait for wait in waits))
        await ended(run, "stage score")
        await run.play_all()
        there = await run.client.lease_stage(msgspec.structs.replace(ask, attempt="there", wait=0))
        assert there.batch is not None
        assert there.batch.groups == 2


async def test_a_request_that_does_not_wait_is_carried_out_without_its_client(tmp_path):
    """A change that was begun is not cut in the middle."""
    async with served(tmp_path) as run:
        began, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slow(value):
            began.set()
            await go_on.wait()
            ended.set()

        run.service.on(post("/slow", dict, type(None), "operator", summary="Slow"), slow)
        async with asked(run.url, "/slow", {}):
            await asyncio.wait_for(began.wait(), 60)
        await asyncio.sleep(0.05)
        go_on.set()
        await asyncio.wait_for(ended.wait(), 60)
