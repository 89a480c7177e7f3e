"""What storage units, gateways and weight servers cost, measured at the real processes; and what versions take.

Puts and reads go over HTTP, as from another host. A gateway is measured with short and long answers, streamed, so that
a call's cost and a token's can be separated. A version's delta, and what a GPU takes to make and apply one, are what
`bench.weights` and `bench.weights_gpu` have recorded.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.dataflow_ours import disk_write
from bench.gateway import Asked
from bench.scale_costs import Meter, PartCosts, call_and_each, recorded
from bench.traffic import COLUMNS, Columns, Processes, make_run, trajectory
from rillflow.clients.payloads import PayloadReader
from rillflow.clients.units import UnitWriter
from rillflow.gateway import Renderer
from rillflow.storage import write_atomic
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.serve import serve_weights
from rillflow.wire.tokens import scoped_token

TOKEN = "of no run"
SHORT, LONG = 1000, 16_000  # tokens of a row
AT_ONCE, TURNS = 8, 4
FEW, MANY = 32, 2048  # tokens of an answer
DELTA_BYTES = 16 << 20  # of a file that is served


def measure_parts(*, quick: bool = False) -> PartCosts:
    rounds = 10 if quick else 40
    return PartCosts(
        **asyncio.run(_units(rounds)),
        **_gateway(64 if quick else 256),
        **asyncio.run(_weights(rounds)),
        disk_byte=statistics.median(disk_write(64 << 20, synced=True) for _ in range(3)) / (64 << 20),
        encode_byte=1e-9 / recorded("weights_gpu-h200", "random weights, lr 1e-06, 1.30 % changed: encode"),
        apply_byte=1e-9 / recorded("weights_gpu-h200", "random weights, lr 1e-06, 1.30 % changed: apply"),
        # GB for 14.8e9 weights, of which as many change as at lr 1e-6
        delta_share=recorded("weights-cpu-aarch64", "14.8B weights, 0.20 % changed as at lr 1e-06, AstraFlow") / 14.8,
    )


# ---------------------------------------------------------------- storage units


async def _units(rounds: int) -> dict[str, float]:
    """Of puts by `AT_ONCE` nodes, a row each, and of reads of ranks, `AT_ONCE` rows a call."""
    with tempfile.TemporaryDirectory() as parent:
        folder = make_run(Path(parent), 8, {"main": {}}, {"units": {"count": 1}})
        with Processes(folder, 1) as processes:
            client = await processes.ready()
            process = processes.roles[1].process
            assert process is not None
            writer = UnitWriter(client.units, folder.token, allow_local=False)
            reader = PayloadReader(client.units, folder.token, allow_map=False)
            meter = Meter(process.pid)
            meter.start()
            await asyncio.sleep(2.0)
            meter.idle = meter.stop() / 2.0
            try:
                puts, gets = {}, {}
                for length in (SHORT, LONG):
                    row = trajectory(length)
                    size = sum(column.nbytes for column in row.values())
                    puts[size], gets[size * AT_ONCE] = await _put_and_get(writer, reader, meter, row, rounds)
            finally:
                await writer.close()
                await reader.close()
                await client.close()
    put_call, put_byte = call_and_each(*puts.items())
    get_call, get_byte = call_and_each(*gets.items())
    return {"put_call": put_call, "put_byte": put_byte, "get_call": get_call, "get_byte": get_byte}


async def _put_and_get(
    writer: UnitWriter, reader: PayloadReader, meter: Meter, row: Columns, rounds: int
) -> tuple[float, float]:
    places: list[Any] = []
    await writer.put([row])
    meter.start()
    for _ in range(rounds):
        for put in await asyncio.gather(*(writer.put([row]) for _ in range(AT_ONCE))):
            places += put
    put_seconds = meter.stop(rounds * AT_ONCE)
    meter.start()
    for at in range(rounds):
        await reader.read(places[at * AT_ONCE :][:AT_ONCE], list(COLUMNS))
    return put_seconds, meter.stop(rounds)


# ---------------------------------------------------------------- the gateway


def _gateway(calls: int) -> dict[str, float]:
    costs = {tokens: _gateway_call(tokens, calls) for tokens in (FEW, MANY)}
    call, token = call_and_each(*costs.items())
    return {"gateway_call": call, "gateway_token": token}


def _gateway_call(tokens: int, calls: int) -> float:
    """Return the seconds of a gateway for one call whose answer has `tokens` tokens, over sessions of `TURNS` turns."""
    ids, texts = _answer(tokens)
    with ExitStack() as stack:
        upstream = _started(stack, "bench.gateway_upstream", json.dumps({"ids": ids, "texts": texts}))
        port = upstream.hear()["port"]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ours = _started(stack, "bench.gateway_ours", f"http://127.0.0.1:{port}", folder)
        asked = {"port": ours.hear()["port"], "bodies": _bodies("".join(texts), tokens), "agents": AT_ONCE}
        load = _started(stack, "bench.gateway_load")
        meter = Meter(ours.pid)
        for number in (TURNS * AT_ONCE, calls):  # the first ones warm up
            keys = ours.ask(open=number // TURNS + AT_ONCE + 1)["keys"]
            meter.start()
            load.ask(**asked, keys=keys, calls=number)
            used = meter.stop(number)
        return used


def _started(stack: ExitStack, module: str, *arguments: str) -> Asked:
    process = Asked(module, *arguments)
    stack.callback(process.close)
    return process


def _answer(tokens: int) -> tuple[list[int], list[str]]:
    """Ids, and their text in the four parts in which the upstream streams it."""
    renderer = Renderer.load("tiny")
    text = " ".join(f"box {number} has {number + 3} bolts" for number in range(tokens))
    ids = [*renderer.encode(text)[: tokens - 1], renderer.stop_tokens[0]]
    size = tokens // 4
    return ids, [renderer.decode(ids[at : at + size]) for at in range(0, tokens, size)]


def _bodies(said: str, tokens: int) -> list[str]:
    messages: list[dict[str, str]] = []
    made = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"How many bolts are in box {turn}?"})
        made.append(json.dumps({"model": "parts", "messages": messages, "stream": True, "max_tokens": tokens}))
        messages.append({"role": "assistant", "content": said})
    return made


# ---------------------------------------------------------------- weights


async def _weights(rounds: int) -> dict[str, float]:
    """Measure a weight server for a node that pulls a version: the line, the manifest and the file."""
    with tempfile.TemporaryDirectory() as parent, _serving(Path(parent)) as (url, pid):
        meter = Meter(pid)
        headers = {"authorization": f"Bearer {scoped_token(TOKEN, 'reader')}"}
        async with aiohttp.ClientSession(url, headers=headers) as session:
            line = await _get(session, "/weights/main/line")
            assert line
            manifest = json.loads(await _get(session, "/weights/main/0/manifest.json"))
            (file,) = manifest["files"]
            costs = {}
            for size in (1000, DELTA_BYTES):
                meter.start()
                for _ in range(rounds):
                    await _get(session, "/weights/main/line")
                    await _get(session, "/weights/main/0/manifest.json")
                    await _get(session, f"/weights/main/0/{file}", size)
                costs[size] = meter.stop(rounds)
    call, byte = call_and_each(*costs.items())
    return {"serve_call": call, "serve_byte": byte}


async def _get(session: aiohttp.ClientSession, path: str, size: int | None = None) -> bytes:
    asked = {"range": f"bytes=0-{size - 1}"} if size else {}
    async with session.get(path, headers=asked) as response:
        response.raise_for_status()
        return await response.read()


@contextmanager
def _serving(folder: Path) -> Iterator[tuple[str, int]]:
    """A weight server with one version, in a process of its own."""
    import torch

    store = FolderStore(folder / "weights" / "main")
    store.publish({"w": torch.from_numpy(np.random.default_rng(0).random(DELTA_BYTES // 4, np.float32))}, 0, None)
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder,))
    process.start()
    try:
        url = _await(folder / "url")
        assert process.pid is not None
        yield url, process.pid
    finally:
        process.terminate()
        process.join(30)


def _serve(folder: Path) -> None:
    def ready(url: str) -> None:
        write_atomic(folder / "url", url.encode())

    asyncio.run(serve_weights(folder / "weights", TOKEN, on_ready=ready))


def _await(path: Path, seconds: float = 300.0) -> str:
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.is_file():
            return path.read_text()
        time.sleep(0.05)
    raise RuntimeError(f"{path} did not come up within {seconds:.0f} s: the process that writes it has failed")
