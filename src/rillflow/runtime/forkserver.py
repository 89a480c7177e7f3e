"""Forking a process that has imported torch, so that the new one does not import it again; and the fork server.

    supervisor ──socket──▶ fork server ──fork──▶ trainer, rollout node, engine process

`python -m rillflow.runtime.forkserver` serves the socket that is its standard input: lines of JSON, in both directions.

    → {"run", "modules"}                             import them; with transformers, the classes of the run's models too
    → {"log"}                                        write there from now on, first what was said until now
    → {"id", "arguments", "environment", "log"}     fork a process that runs `rillflow ARGUMENTS`
    → {"kill": id}                                   end it and its group; for a caller that has stopped waiting
    ← {"id", "pid"}, then {"id", "code"}             as `subprocess` has them: a signal's number is negative
    ← {"id", "error"}                                nothing was forked

Invariants: only a process with one thread and without a CUDA context forks; the server refuses otherwise. A forked
process keeps no file of its parent but its log, begins with the default signals, and never returns into the code of its
parent. The server computes nothing and holds no file of the run. Its end ends its children (they are sent SIGTERM), and
the end of the socket ends it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import setproctitle

from rillflow.errors import RillflowError
from rillflow.runtime.process import PARENT_ENV, leave
from rillflow.trainer.parallel.launch import Process, Start, start_process

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_RESET = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ENDING_SECONDS = 0.5  # that a thread which was joined may still be there


def unsafe() -> str | None:
    """Return why this process must not fork, or None. Children of a process with threads inherit their locks."""
    end = time.monotonic() + _ENDING_SECONDS
    while len(names := _threads()) != 1:
        if threading.active_count() > 1 or time.monotonic() > end:
            return f"it has {len(names)} threads ({', '.join(names)})"
        time.sleep(0.001)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has a CUDA context"
    return None


def _threads() -> list[str]:
    """Return the names of this process's threads, those that are just ending left out."""
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append((thread / "comm").read_text().strip())
    return names


# Before a fork, a look for GPUs must not make a CUDA context, and neither numpy's BLAS nor the allocator of pyarrow,
# which transformers imports where it is installed, may start a thread.
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


def start_ranks(modules: Sequence[str]) -> Start:
    """Return a function that starts the ranks of a trainer with the arguments of `rillflow`: forked from this process,
    which imports `modules` once for all of them, or as new processes if it must not fork."""
    if sys.platform == "linux":
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        for module in modules:
            importlib.import_module(module)
    return _start_rank


def _start_rank(arguments: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> Process:
    rank = arguments[arguments.index("--rank") + 1]
    reason = unsafe() if sys.platform == "linux" else "only Linux forks"
    if reason is None:
        log.info("forking rank %s", rank)
        return ForkedChild(arguments, environment, log_path)
    log.info("starting rank %s, which imports for itself: this process must not fork, %s", rank, reason)
    return start_process([sys.executable, "-m", "rillflow", *arguments], environment, log_path)


def become(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Turn a process that was just forked into the one that `python -m rillflow ARGUMENTS` would be."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    setproctitle.setproctitle(" ".join([sys.executable, "-m", "rillflow", *arguments]))
    os.environ.clear()  # after the title, whose place is found by the environment
    os.environ.update(environment)
    sys.argv = ["rillflow", *arguments]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(None)  # as a new process does; `random` does so at each fork, torch has a fixed seed
    runpy.run_module("rillflow", run_name="__main__", alter_sys=True)


def write_to(log_path: Path | None) -> None:
    """Let standard output and error go to a file, or stay; nothing can be read from standard input."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if log_path is not None:
        output = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)


class ForkedChild:
    """A child of this process that runs `rillflow ARGUMENTS`; as of `subprocess.Popen`: poll, wait, kill, terminate."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> None:
        self._process = multiprocessing.get_context("fork").Process(
            target=_begin, args=(list(arguments), dict(environment), log_path)
        )
        # No signal may meet the parent's handlers in the child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _RESET)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _begin(arguments: list[str], environment: dict[str, str], log_path: Path | None) -> None:
    gc.freeze()  # garbage of the parent would, once collected here, close descriptors that are this process's by then
    write_to(log_path)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing had opened another file for it
    for number in _RESET:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RESET)
    become(arguments, environment)


# ---------------------------------------------------------------- the fork server

_CHUNK = 1 << 16
_SAID = 1 << 20  # the most bytes of output that a server keeps before it has a log


def main() -> None:
    """Serve the socket that is standard input."""
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    serve(channel)


def serve(channel: socket.socket) -> None:
    """Serve until the other side has gone, then end; in a forked child, run its command and end as `python -m rillflow`
    does."""
    request = Server(channel).serve()
    if request is None:
        # The interpreter's own end touches every object, so it would copy all memory that is shared with forks.
        leave(0)
    write_to(Path(request["log"]))
    become(request["arguments"], request["environment"])


def _write_on(log_path: Path) -> None:
    said = os.pread(1, _SAID, 0)  # of the file that was standard output until now
    write_to(log_path)
    os.write(1, said)


def _preload(run: Path, modules: Sequence[str]) -> None:
    gc.disable()  # nearly nothing that imports make is garbage; collections took a fifth of their time
    try:
        for module in modules:
            importlib.import_module(module)
        if "transformers" in modules:
            _import_classes(run)
    finally:
        gc.enable()
    gc.freeze()  # collections in children pass over what they share, and do not write to its pages


def _import_classes(run: Path) -> None:
    """Import the modules of transformers that the run's models need, by the class names in their own files."""
    import transformers

    from rillflow.runtime.folder import RunFolder
    from rillflow.weights.model_folder import model_folder

    names = {"AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"}
    with suppress(RillflowError, OSError, ValueError):  # a role says what is wrong with its model
        for policy in RunFolder.open(run).recipe.policies.values():
            folder = model_folder(policy.model)
            names |= set(json.loads((folder / "config.json").read_text()).get("architectures") or ())
            names.add(json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class", ""))
    for name in names:
        getattr(transformers, name, None)  # a lazy module: this imports it


class Server:
    """Forks on request and reports how children end."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, int]] = {}  # pid and pidfd by the request's id
        self._received = b""

    def serve(self) -> dict[str, Any] | None:
        """Serve until the other side has gone: None. In a child, return the request that it was forked for."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._report(key.data)
                    continue
                try:
                    received = self._channel.recv(_CHUNK)
                except ConnectionResetError:
                    received = b""
                if not received:
                    return None
                if (own := self._take(received)) is not None:
                    return own

    def _take(self, received: bytes) -> dict[str, Any] | None:
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request.keys() == {"log"}:
                _write_on(Path(request["log"]))
            elif "modules" in request:
                _preload(Path(request["run"]), request["modules"])
            elif "kill" in request:
                self._kill(request["kill"])
            elif self._fork(request):
                return dict(request)
        return None

    def _fork(self, request: dict[str, Any]) -> bool:
        """Return whether this is the child."""
        if (reason := unsafe()) is not None:
            self._send({"id": request["id"], "error": f"the fork server must not fork: {reason}"})
            return False
        request["environment"][PARENT_ENV] = str(os.getpid())
        grouped, group = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(grouped)
            os.close(group)
            self._send({"id": request["id"], "error": f"cannot fork: {error}"})
            return False
        if pid == 0:
            os.setsid()
            os.close(group)
            os.close(grouped)
            self._forget()
            return True
        os.close(group)
        os.read(grouped, 1)  # ends when the child has its own group, or has died: signals can reach it from here on
        os.close(grouped)
        watched = os.pidfd_open(pid)
        self._children[request["id"]] = pid, watched
        self._selector.register(watched, selectors.EVENT_READ, request["id"])
        self._send({"id": request["id"], "pid": pid})
        return False

    def _forget(self) -> None:
        """Close in a child what belongs to the server."""
        self._selector.close()
        self._channel.close()
        for _, watched in self._children.values():
            os.close(watched)

    def _report(self, number: int) -> None:
        pid, watched = self._children.pop(number)
        self._selector.unregister(watched)
        os.close(watched)
        _, status = os.waitpid(pid, 0)
        self._send({"id": number, "code": os.waitstatus_to_exitcode(status)})

    def _kill(self, number: int) -> None:
        if number in self._children:
            pid, _ = self._children[number]
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the next read finds that the other side has gone
            self._channel.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
