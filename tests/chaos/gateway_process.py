"""A gateway with sessions on disk, killed whenever it is asked to be: `python gateway_process.py FOLDER PORT`.

Everything is loaded once; each line of input kills the gateway's process and forks another one, which prints the keys
of its sessions when it serves. Answers depend on prompt and seed alone, take a while and come bit by bit; no model is
loaded. An answer of at most `HELD` tokens stops after its first bit, for good. With the end of the input all ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from hashlib import blake2b
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "gateway"))

from gateway_support import make_renderer

from rillflow.config import SamplingConfig
from rillflow.gateway import Gateway, Policy
from rillflow.gateway.sessions.session_log import FileSessionLog
from rillflow.types import Chunk, GenerateRequest

SESSIONS = 16
HELD = 77
TOKEN = "the run's token"


class Slow:
    """Letters drawn from a hash of prompt and seed."""

    context = 1 << 16

    def __init__(self, letters: list[int], end: int) -> None:
        self._letters = letters
        self._end = end

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        drawn = blake2b(f"{request.tokens}/{request.sampling.seed}".encode(), digest_size=24).digest()
        ids = [self._letters[byte % len(self._letters)] for byte in drawn] + [self._end]
        for at in range(0, len(ids), 5):
            await asyncio.sleep(0.004)
            part = ids[at : at + 5]
            logprobs = [-token / 128 for token in part]
            finish = "stop" if at + 5 >= len(ids) else None
            yield Chunk(tokens=part, logprobs=logprobs, raw_logprobs=logprobs, version=1, finish=finish)
            if request.sampling.max_tokens == HELD:
                await asyncio.Event().wait()


async def serve(folder: Path, port: int, policy: Policy) -> None:
    log = FileSessionLog(folder)
    gateway = Gateway(TOKEN, {"policy": policy}, {"policy": SamplingConfig()}, log=log)
    keys = {session.id: session.key for session in gateway.sessions.restore()}
    for number in range(0 if keys else SESSIONS):
        name = f"s{number}"
        keys[name] = gateway.sessions.open(name, seed=number, group=name, deadline_seconds=600, detail={"n": number})
    await log.synced()
    await gateway.start(port=port)
    print(json.dumps(keys), flush=True)
    await asyncio.Event().wait()


def kill(process: int) -> None:
    if process:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def main(folder: Path, port: int) -> None:
    renderer = make_renderer()
    assert renderer.end_token is not None
    letters = [renderer.encode(letter)[0] for letter in "abcdefghijklmnop"]
    policy = Policy(Slow(letters, renderer.end_token), renderer)
    process = 0
    while sys.stdin.readline():
        kill(process)
        process = os.fork()
        if not process:
            asyncio.run(serve(folder, port, policy))
    kill(process)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
