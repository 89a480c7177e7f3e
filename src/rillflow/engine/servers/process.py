"""A server's process, and what is the same for the command lines of all servers.

Invariants: a server runs in its own process group and writes into a log file; the group is killed when this process
ends, however it ends (`engine.reaper`); `stop` returns once the group is gone, so that its memory is free for the next.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import torch

from rillflow.engine.reaper import Reaper, kill_group
from rillflow.engine.servers.weights import ModelFacts
from rillflow.errors import ConfigError

_GENTLE_SECONDS = 5.0  # for the server and its children to end before they are killed
_ORPHANS_SECONDS = 1.0  # for what it has started to end after it
_KILLED_SECONDS = 10.0  # for the kernel to take a process away: a GPU's driver may hold it up
_LOOK_SECONDS = 0.02
_TAIL_BYTES = 4000
_CAUSE_BYTES = 1 << 20
# The last line of a traceback, and the next one if it is indented: pydantic says there what is wrong.
_ERROR = re.compile(r"(?m)(?:^|[\])] )((?:\w+\.)*\w*(?:Error|Exception|Exit): .+(?:\n  +\S.*)?)")
# vLLM's server ends with one of these when another of its processes has logged the cause.
_OF_ANOTHER = ("Engine core initialization failed", "EngineCore encountered an issue")
INSIDE = Path(__file__).resolve().parent / "inside"  # on the PYTHONPATH of every server
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}  # as servers call them
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ServerProcess:
    """One run of the server; another one is another object."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self.log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reaper = Reaper()

    async def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as words:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,
            )
        self._reaper.watch(self._process.pid)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Until it has ended; its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        if self._process is None:
            return
        group = self._process.pid
        if self.running:
            with suppress(ProcessLookupError):
                self._process.terminate()  # it ends what it has started, in its own order
            await self._ended(_GENTLE_SECONDS)
        if not await _gone(group, 0.0 if self.running else _ORPHANS_SECONDS):
            kill_group(group)
            await self._ended(_KILLED_SECONDS)
            await _gone(group, _KILLED_SECONDS)
        self._reaper.forget(group)
        self._reaper.close()

    async def _ended(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait()

    def tail(self) -> str:
        """Return the last lines of its log, for error messages."""
        return "\n".join(self._end(_TAIL_BYTES).splitlines()[-15:])

    def cause(self) -> str:
        """Return the last error in its log that tells a cause, or an empty string."""
        errors = [
            found for found in _ERROR.findall(self._end(_CAUSE_BYTES)) if not any(text in found for text in _OF_ANOTHER)
        ]
        return " ".join(errors[-1].split()) if errors else ""

    def _end(self, size: int) -> str:
        try:
            with open(self.log, "rb") as words:
                words.seek(max(0, os.path.getsize(self.log) - size))
                return words.read().decode(errors="replace")
        except OSError:
            return ""


async def _gone(group: int, seconds: float) -> bool:
    """Return whether a group has ended, after `seconds` at most."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    try:
        while True:
            os.killpg(group, 0)
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
    except ProcessLookupError:
        return True


def free_port() -> int:
    """Return a loopback port that is free now. Another program may take it before the server does."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


# ------------------------------------------------------------ command lines


def has_tokenizer(model: ModelFacts) -> bool:
    """Return whether the model has a tokenizer for grammars; a model of a hub is assumed to have one."""
    return not model.folder.is_dir() or (model.folder / "tokenizer.json").exists()


def on_loopback(url: str) -> str:
    """Return the URL of a server on this machine. Requests to it are not encrypted, and a client can change its
    weights: a server elsewhere is reached through a tunnel that ends here."""
    if urlsplit(url).hostname not in _LOOPBACK:
        raise ConfigError(
            f"engine.server.url is {url}: not on this machine's loopback",
            "run the node beside the server, or open a tunnel (ssh -L 8000:127.0.0.1:8000 HOST) and name its near end",
        )
    return url.rstrip("/")


def visible_gpus(device: torch.device, count: int) -> dict[str, str]:
    """Return the variable that shows a server `count` GPUs from `device` on, among those visible to this process."""
    if device.type == "cpu":
        # Not an empty string: Ray uses that for processes that will get GPUs later, and vLLM would then use Triton.
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    if ":" not in str(device):  # without a number
        return {}
    end = device.index + count
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(end)] if seen is None else seen.split(",")
    if len(names) < end:
        raise ConfigError(
            f"{count} GPUs from {device} on are not visible: CUDA_VISIBLE_DEVICES is {seen}",
            "lower engine.server.tensor_parallel, or show more GPUs",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[device.index : end])}
