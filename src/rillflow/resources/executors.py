"""The executors of a maintainer: rollout nodes as processes on this machine, or by commands of the user.

A node is in the file of its executor from before its start until after its stop, so that a new maintainer finds every
node that may be running, whatever was killed meanwhile. Each process is in a session of its own and outlives the
maintainer. A process is ours if its start time is the recorded one and its command line exactly the one that starts a
node; no other process is ever signalled. A node whose start was interrupted before its pid was recorded is found by its
command line.

In a command {node}, {url} and {token_file} stand for their values, quoted for the shell; everything else, including
other braces, stays as it is. A command has a deadline, after which its process group is killed. Between two commands
the scheduler of the user is responsible for the node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from rillflow.config.runs import ScalingConfig
from rillflow.contracts import Executor
from rillflow.errors import CorruptData, RunError
from rillflow.storage import disk_errors, write_atomic
from rillflow.types.base import json_decoder

log = logging.getLogger(__name__)


class Kept(msgspec.Struct, forbid_unknown_fields=True):
    """A node. `pid` and `began` (seconds since the epoch) are of a process on this machine, once it is known."""

    pid: int | None = None
    began: float | None = None


class KeptNodes:
    """The nodes on disk, written atomically; the file is removed with its last node."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> dict[str, Kept]:
        if not self._path.is_file():
            return {}
        try:
            return json_decoder(dict[str, Kept]).decode(self._path.read_bytes())
        except msgspec.MsgspecError as error:
            raise CorruptData(
                f"{self._path} cannot be read: {error}",
                "end the nodes that it names by hand (rillflow retire), then remove it",
            ) from error

    def keep(self, node: str, kept: Kept) -> None:
        self._write(self.all() | {node: kept})

    def forget(self, node: str) -> None:
        self._write({name: kept for name, kept in self.all().items() if name != node})

    def _write(self, nodes: dict[str, Kept]) -> None:
        if nodes:
            write_atomic(self._path, msgspec.json.format(msgspec.json.encode(nodes), indent=2) + b"\n")
        else:
            self._path.unlink(missing_ok=True)


# ---------------------------------------------------------------- processes

_GRACE = 5.0  # seconds between asking a process to end and ending it
_POLL = 0.05
_CLOCK_STEP = 2.0  # seconds by which the start of a process may seem to move when the machine's clock is set


class LocalExecutor:
    """Starts local processes. `environment` is that of a node; it holds the token, which a command line would show to
    all users."""

    def __init__(
        self,
        root: Path,
        url: str,
        environment: Mapping[str, str],
        *,
        options: Sequence[str] = (),
        grace: float = _GRACE,
    ) -> None:
        self._root, self._url, self._grace = root, url, grace
        self._environment, self._options = dict(environment), tuple(options)
        self._kept = KeptNodes(root / "maintainer-nodes.json")

    async def start(self, node: str) -> None:
        if node in self._kept.all():
            raise RunError(f"{node} was started before", "give every node a name of its own")
        self._kept.keep(node, Kept())
        log_path = self._root / "logs" / f"{node}.log"
        with disk_errors(log_path):
            log_path.parent.mkdir(parents=True, exist_ok=True)
            output = open(log_path, "ab")  # noqa: SIM115
        with output:
            try:
                pid = self._spawn(node, output.fileno())
            except OSError as error:
                raise RunError(f"{node} cannot be started: {error}", "has the machine room for more?") from error
        with suppress(psutil.NoSuchProcess):
            self._kept.keep(node, Kept(pid, psutil.Process(pid).create_time()))

    def _spawn(self, node: str, output: int) -> int:
        words = self._words(node)
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ]
        return os.posix_spawn(words[0], words, self._environment, file_actions=files, setsid=True)

    def _words(self, node: str) -> list[str]:
        cache = str(self._root / "gateway" / node)
        words = [sys.executable, "-m", "rillflow", "rollout", "--join", self._url, "--name", node, "--cache", cache]
        return [*words, *self._options]

    async def nodes(self) -> dict[str, bool]:
        kept = self._kept.all()
        return {node: await asyncio.to_thread(self._find, node, found) is not None for node, found in kept.items()}

    async def stop(self, node: str) -> None:
        kept = self._kept.all().get(node)
        if kept is None:
            return
        process = await asyncio.to_thread(self._find, node, kept)
        if process is not None:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # a second one ends what drains
                _signal(process, number)
                if await self._gone(process):
                    break
            else:
                raise RunError(f"{node} (pid {process.pid}) does not end", "look at what it hangs in: a dead disk?")
            _signal(process, signal.SIGKILL)  # its remaining children
        self._kept.forget(node)

    async def close(self) -> None:
        """Release nothing: the nodes run on."""

    # ------------------------------------------------------------ processes

    def _find(self, node: str, kept: Kept) -> psutil.Process | None:
        """Return the node's process if it runs."""
        if kept.pid is None:
            return self._search(node)
        _reap(kept.pid)
        try:
            process = psutil.Process(kept.pid)
            began = process.create_time()
        except psutil.NoSuchProcess:
            return None
        same = kept.began is not None and abs(began - kept.began) <= _CLOCK_STEP
        return process if same and self._is(process, node) else None

    def _search(self, node: str) -> psutil.Process | None:
        """Search the process of a node whose start was interrupted, before or after the process existed."""
        return next((process for process in psutil.process_iter() if self._is(process, node)), None)

    def _is(self, process: psutil.Process, node: str) -> bool:
        try:
            ours = process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE
            return ours and process.cmdline()[1:] == self._words(node)[1:]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False

    async def _gone(self, process: psutil.Process) -> bool:
        deadline = asyncio.get_running_loop().time() + self._grace
        while asyncio.get_running_loop().time() < deadline:
            if not _reap(process.pid) and _ended(process):
                return True
            await asyncio.sleep(_POLL)
        return False


def _ended(process: psutil.Process) -> bool:
    """Return whether the process has ended. Its command line is empty before that, so it is not used."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _reap(pid: int) -> bool:
    """Reap a process if it is our child and has ended. Return whether it is our child and has not: a process looks like
    a zombie already while threads of it still end."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    """Signal its process group, which it leads: a group's number is not reused while the group has members."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


# ---------------------------------------------------------------- commands

DEADLINE = 60.0
_PLACES = re.compile(r"\{(node|url|token_file)\}")
_TAIL = 2000  # characters of a command's output that an error shows
_LAST = 5.0  # seconds for a killed command to be gone


class CommandExecutor:
    """Starts and stops nodes by commands. Without `alive` every started node counts as running until it is stopped; a
    failed node then shows only by not joining, or by missing heartbeats."""

    def __init__(
        self,
        root: Path,
        *,
        start: str,
        stop: str,
        alive: str | None,
        url: str,
        token_file: Path,
        deadline: float = DEADLINE,
    ) -> None:
        self._start, self._stop, self._alive = start, stop, alive
        self._values = {"url": url, "token_file": str(token_file)}
        self._root, self._deadline = root, deadline
        self._kept = KeptNodes(root / "maintainer-nodes.json")

    async def start(self, node: str) -> None:
        if node in self._kept.all():
            raise RunError(f"{node} was started before", "give every node a name of its own")
        self._kept.keep(node, Kept())
        code, said = await self._run(self._start, node)
        if code != 0:
            raise RunError(f"the command that starts {node} ended with code {code}: {said}", _hint("start"))

    async def stop(self, node: str) -> None:
        if node not in self._kept.all():
            return
        if self._alive is None or await self._lives(node):
            code, said = await self._run(self._stop, node)
            if code != 0 and (self._alive is None or await self._lives(node)):
                raise RunError(f"the command that ends {node} ended with code {code}: {said}", _hint("stop"))
        self._kept.forget(node)

    async def nodes(self) -> dict[str, bool]:
        names = list(self._kept.all())
        if self._alive is None:
            return dict.fromkeys(names, True)
        return {name: await self._lives(name) for name in names}

    async def close(self) -> None:
        """Release nothing: the nodes run on."""

    async def _lives(self, node: str) -> bool:
        assert self._alive is not None
        return (await self._run(self._alive, node))[0] == 0

    async def _run(self, template: str, node: str) -> tuple[int, str]:
        """Return its exit code and the end of its output."""
        command = filled(template, {**self._values, "node": node})
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self._root,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._deadline):
                output, _ = await process.communicate()
        except TimeoutError:
            raise RunError(
                f"`{command}` was still running after {self._deadline:.0f} s",
                "it must return once the scheduler has taken the job, not when the node ends",
            ) from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LAST):
                        await process.wait()
        assert process.returncode is not None
        return process.returncode, output.decode(errors="replace").strip()[-_TAIL:]


def filled(template: str, values: Mapping[str, str]) -> str:
    """Return the command with the values filled in, each quoted as one shell word."""
    return _PLACES.sub(lambda place: shlex.quote(values[place[1]]), template)


def _hint(which: str) -> str:
    return f"try it by hand; it is resources.scaling.{which} of the recipe"


@dataclass(frozen=True)
class Home:
    """The settings with which nodes are started. `root` is the maintainer's folder (the run folder, if it has one),
    `url` the dataflow service's address, `token` the node's token, `environment` that of local processes, with the
    token."""

    root: Path
    url: str
    token: str
    token_file: Path
    environment: Mapping[str, str]


def build_executor(scaling: ScalingConfig, home: Home) -> Executor:
    if scaling.executor == "local":
        return LocalExecutor(home.root, home.url, home.environment)
    if scaling.executor == "ray":
        from rillflow.resources.ray_executor import RayExecutor

        return RayExecutor.of(home.root, home.url, home.token)
    assert scaling.start is not None
    assert scaling.stop is not None
    return CommandExecutor(
        home.root,
        start=scaling.start,
        stop=scaling.stop,
        alive=scaling.alive,
        url=home.url,
        token_file=home.token_file,
    )
