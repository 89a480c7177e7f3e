"""A process that has imported what trainers and nodes need, and forks one of them for each request.

    supervisor ──socket──▶ fork server ──fork──▶ trainer, rollout node, engine process

`python -m rillflow.runtime.forkserver` serves the socket that is its standard input: lines of JSON, in both directions.

    → {"run", "modules"}                             import them; with transformers, the classes of the run's models too
    → {"id", "arguments", "environment", "log"}     fork a process that runs `rillflow ARGUMENTS`
    → {"kill": id}                                   end it and its group; for a caller that has stopped waiting
    ← {"id", "pid"}, then {"id", "code"}             as `subprocess` has them: a signal's number is negative
    ← {"id", "error"}                                nothing was forked

Invariants: the server runs one thread and has no CUDA context whenever it forks, else it refuses; it computes nothing
and holds no file of the run. Its end ends its children (they are sent SIGTERM), and the end of the socket ends it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import setproctitle

from rillflow.errors import RillflowError
from rillflow.runtime.process import PARENT_ENV

_CHUNK = 1 << 16
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve; in a forked child, run its command and end as `python -m rillflow` does."""
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    setproctitle.getproctitle()  # finds the place of the title, for which the environment must be as it was
    request = Server(channel).serve()
    if request is not None:
        _run(request)


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
            if "modules" in request:
                _preload(Path(request["run"]), request["modules"])
            elif "kill" in request:
                self._kill(request["kill"])
            elif self._fork(request):
                return dict(request)
        return None

    def _fork(self, request: dict[str, Any]) -> bool:
        """Return whether this is the child."""
        if (reason := unsafe()) is not None:
            self._send({"id": request["id"], "error": reason})
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


def unsafe() -> str | None:
    """Return why this process must not fork, or None. Children of a process with threads inherit their locks."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"the fork server has {threads} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the fork server has a CUDA context"
    return None


def _run(request: dict[str, Any]) -> None:
    """Become the process that `python -m rillflow ARGUMENTS` would be."""
    arguments: list[str] = request["arguments"]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    setproctitle.setproctitle(" ".join([sys.executable, "-m", "rillflow", *arguments]))
    sys.argv = ["rillflow", *arguments]
    _renew_randomness()
    runpy.run_module("rillflow", run_name="__main__", alter_sys=True)


def _renew_randomness() -> None:
    """Seed what a new process seeds from the system. `random` does so at each fork; torch begins with a fixed seed."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(None)


if __name__ == "__main__":
    main()
