"""Processes that import torch before a run asks for them: the warm process (`rillflow warm`), the early fork server.

    rillflow run ──socket──▶ warm process ──fork──▶ fork server of that run ──fork──▶ trainer, rollout node
    rillflow try ──socket──▶ warm process ──fork──▶ the same command, with the streams of the one that asked

    rillflow run ──▶ early fork server: imports          handed to the `Preloaded` of the run,
                 └─▶ reads and checks the recipe ──────▶ or ended if no run follows

The warm process imports packages of others, and of Rillflow only what this file needs: changes of your own code count
in the next run. A run that finds no warm process, or one that must not serve it (another interpreter, packages
installed since, other settings in the environment), starts its own fork server: the early one, while the command still
reads its recipe. This module is imported first of all and has to stay light.

A request to the warm process is one message: a line of JSON with the environment, the working folder and the log of the
run, and the file descriptor of the socket that its fork server shall serve. The answer is `{"pid"}` or `{"error"}`. A
request with `arguments` is for a process that runs `rillflow ARGUMENTS`: it carries the descriptors of standard output
and error too, the forked process sends its exit code through the socket, and is interrupted when the other end of the
socket closes.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import logging
import os
import signal
import site
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from rillflow.errors import RunError
from rillflow.runtime import forkserver
from rillflow.runtime.forkserver import ENVIRONMENT, become, unsafe, write_to
from rillflow.runtime.process import child_environment

log = logging.getLogger(__name__)

# The path of its socket; an empty value disables it.
PATH_ENV = "RILLFLOW_WARM"
MODULES = ("torch", "torch.distributed", "transformers.modeling_utils", "transformers.models.auto", "openai", "aiohttp")
# What libraries read when they are imported. OMP_NUM_THREADS is not among it: each role sets its own number of threads.
_READ_EARLY = ("TORCH", "PYTORCH", "HF_", "TRANSFORMERS", "LD_", "PYTHON", "CUDA_", "MIMALLOC", "XDG_", "HOME")
_ANSWER_WITHIN = 10.0
_MOST = 1 << 20


def socket_path() -> Path | None:
    """Return the socket's path of this user and interpreter's warm process; None if `RILLFLOW_WARM` is empty."""
    given = os.environ.get(PATH_ENV)
    if given is not None:
        return Path(given) if given else None
    interpreter = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"rillflow-{os.getuid()}" / f"warm-{interpreter}.sock"


def early_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that libraries read when they are imported."""
    return {name: value for name, value in environment.items() if name.startswith(_READ_EARLY)}


def packages_changed() -> dict[str, int]:
    """Return when a package was last installed or removed, for each folder of packages."""
    folders = {*site.getsitepackages(), *(entry for entry in sys.path if entry.endswith("-packages"))}
    return {folder: os.stat(folder).st_mtime_ns for folder in folders if os.path.isdir(folder)}


# ---------------------------------------------------------------- the early fork server

# The imports of all forked processes.
SHARED_MODULES = ("torch", "transformers", "rillflow.cli.main", "rillflow.runtime.roles")
COMMAND = (sys.executable, "-m", "rillflow.runtime.forkserver")  # no arguments: the titles of children are longer


def available() -> bool:
    """Return whether processes can be forked safely and watched here."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def server_environment(threads: int) -> dict[str, str]:
    """Return the environment of a fork server. `threads` are those of libraries that roles do not set themselves."""
    return child_environment(threads) | ENVIRONMENT


@dataclass
class EarlyServer:
    """A fork server that has only been asked to import. Its taker must end it."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    taken: bool = False

    def take(self, log_path: Path) -> EarlyServer:
        """Hand it over; from now on it writes to this log, beginning with its earlier output."""
        self.channel.sendall(json.dumps({"log": str(log_path.absolute())}).encode() + b"\n")
        self.taken = True
        return self


@contextmanager
def early_server(*, wanted: bool, modules: Sequence[str] = SHARED_MODULES) -> Iterator[EarlyServer | None]:
    """Start a fork server that imports now, for a run that may follow; yields None if it is not wanted, not available
    or not faster than the warm process. It ends with the block, unless it was taken."""
    path = socket_path()
    if not wanted or not available() or (path is not None and path.exists()):
        yield None
        return
    own, its = socket.socketpair()
    with its, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            COMMAND, stdin=its.fileno(), stdout=output, stderr=output, env=server_environment(0), start_new_session=True
        )
    early = EarlyServer(process, own)
    own.sendall(json.dumps({"run": "", "modules": list(modules)}).encode() + b"\n")
    try:
        yield early
    finally:
        if not early.taken:
            own.close()
            process.kill()
            process.wait()


# ---------------------------------------------------------------- requests to the warm process


def fork_server(channel: socket.socket, environment: Mapping[str, str], log_path: Path) -> int | None:
    """Let the warm process fork a fork server for `channel` and return its pid; None if none serves this process."""
    return _ask({"environment": dict(environment), "log": str(log_path.absolute())}, [channel.fileno()])


def run_in_fork(arguments: Sequence[str], tell: Callable[[str], None]) -> int | None:
    """Run `rillflow ARGUMENTS` in a process that the warm one forks, with this process's output and error; return its
    exit code, or None if no warm process serves this one. `tell` gets the reason if one exists but refuses."""
    environment = server_environment(threads=0) | {PATH_ENV: ""}  # it must not ask again
    own, its = socket.socketpair()
    with own:
        with its:
            request = {"environment": environment, "arguments": list(arguments)}
            if _ask(request, [its.fileno(), 1, 2], tell) is None:
                return None
        try:
            code = own.recv(_MOST)
        except KeyboardInterrupt:
            own.shutdown(socket.SHUT_WR)  # it is interrupted, too, and says its code
            code = own.recv(_MOST)
    return json.loads(code) if code else 1


def _ask(request: dict[str, Any], files: list[int], tell: Callable[[str], None] = log.info) -> int | None:
    path = socket_path()
    if path is None or not path.exists() or path.parent.stat().st_uid != os.getuid():
        return None
    request |= {"python": [sys.executable, sys.prefix], "folder": os.getcwd(), "packages": packages_changed()}
    message = json.dumps(request).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_ANSWER_WITHIN)
            client.connect(str(path))
            socket.send_fds(client, [message[:1]], files)
            client.sendall(message[1:])
            answer = json.loads(client.makefile("rb").readline() or b'{"error": "it has ended"}')
    except (OSError, ValueError) as error:
        tell(f"the warm process at {path} does not answer: {error}")
        return None
    if "pid" not in answer:
        tell(f"the warm process does not serve this run: {answer['error']}")
        return None
    return int(answer["pid"])


# ---------------------------------------------------------------- the warm process


def start(environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the warm one, with the environment of a fork server."""
    listen().close()  # says what is wrong, before it is too late for a clear error
    os.execve(sys.executable, [sys.executable, "-m", "rillflow.runtime.warm"], dict(environment))


def listen() -> socket.socket:
    """Return the listening socket; raises RunError if a warm process already listens."""
    path = socket_path()
    if path is None:
        raise RunError(f"{PATH_ENV} is empty, which turns warm processes off", f"unset {PATH_ENV}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid():
        raise RunError(f"{path.parent} belongs to another user", f"set {PATH_ENV} to a path of your own")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        try:
            other.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)  # of one that was killed
        else:
            server.close()
            raise RunError(f"a warm process listens at {path} already", "stop it, or use it as it is")
    before = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(before)
    server.listen(64)
    return server


def preload() -> None:
    """Import what runs need. Afterwards this process still has one thread only."""
    gc.disable()
    try:
        for module in MODULES:
            importlib.import_module(module)
    finally:
        gc.enable()
    gc.freeze()


def serve(server: socket.socket, early: Mapping[str, str]) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request. Returns in the forked process only, with its request and its files.

    `early` is the environment in which the packages were imported.
    """
    own = {"python": [sys.executable, sys.prefix], "packages": packages_changed()}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the exit codes of fork servers are not needed
    while True:
        client, _ = server.accept()
        with client:
            client.settimeout(_ANSWER_WITHIN)
            try:
                request, files = _receive(client)
            except (OSError, ValueError) as error:
                log.warning("a request could not be read: %s", error)
                continue
            answer: dict[str, Any]
            if (reason := _refusal(client, request, own, early)) is not None:
                answer = {"error": reason}
            elif (pid := os.fork()) == 0:
                server.close()
                return request, files
            else:
                answer = {"pid": pid}
            for file in files:
                os.close(file)
            with suppress(OSError):
                client.sendall(json.dumps(answer).encode() + b"\n")


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    received, files, _, _ = socket.recv_fds(client, 1, 3)
    try:
        request = json.loads(received + client.makefile("rb").readline(_MOST))
        if len(files) != (3 if "arguments" in request else 1):
            raise ValueError(f"it carries {len(files)} files")
    except BaseException:
        for file in files:
            os.close(file)
        raise
    return request, files


def _refusal(
    client: socket.socket, request: Mapping[str, Any], own: Mapping[str, Any], early: Mapping[str, str]
) -> str | None:
    """Return why this request must not be served, or None."""
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        return "it belongs to another user"
    if request["python"] != own["python"]:
        return f"it runs {own['python'][0]}"
    if request["packages"] != own["packages"]:
        return "packages were installed since it started: start it again"
    asked = early_environment(request["environment"])
    if different := sorted(name for name in {*asked, *early} if asked.get(name) != early.get(name)):
        return f"it has other values of {', '.join(different)}"
    if (reason := unsafe()) is not None:
        return reason
    return None


def main() -> None:
    """Be the warm process, in the environment that `start` has made."""
    server = listen()
    early = early_environment(os.environ)  # packages add to it
    try:
        preload()
        print(f"ready: runs on this machine start from here ({socket_path()}); Ctrl-C ends it", flush=True)
        request, files = serve(server, early)
    except KeyboardInterrupt:
        server.close()
        if (path := socket_path()) is not None:
            path.unlink(missing_ok=True)
        return
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    channel = socket.socket(fileno=files[0])
    if "arguments" in request:
        _run(request, channel, *files[1:])
    setproctitle.setproctitle(f"{sys.executable} -m rillflow.runtime.forkserver")
    write_to(Path(request["log"]))
    os.environ.clear()
    os.environ.update(request["environment"])
    forkserver.serve(channel)


def _run(request: Mapping[str, Any], channel: socket.socket, output: int, error: int) -> NoReturn:
    """Run the requested process to its end."""
    write_to(None)
    for file, number in ((output, 1), (error, 2)):
        os.dup2(file, number)
        os.close(file)
    threading.Thread(target=_follow, args=(channel,), name="caller-watch", daemon=True).start()
    code = 1
    try:
        become(request["arguments"], request["environment"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the requesting process exits once it has the code
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError):  # it may have gone before
        channel.sendall(json.dumps(code).encode())
    os._exit(code)


def _follow(channel: socket.socket) -> None:
    """Interrupt this process when the requesting one has ended."""
    with suppress(OSError):
        channel.recv(1)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
