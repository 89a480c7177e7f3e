"""An actor that hosts one process of a run on its host, reports its state and hands over its output.

The process is a child of the actor, in its own session: a crash in it does not affect Ray, and it keeps its signals. It
dies with the actor. Its output goes to a file on its host, which outlives the actor: the next actor of that name there
continues it, so that no output is lost or handed over twice.

Only strings and numbers go in and out, because Ray pickles every argument: structures are JSON. This module imports
neither Ray nor torch, so that an actor is light and tests need no cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rillflow.errors import RunError

FOLDER = "{folder}"  # in an argument: the folder that the process may keep things in
CHUNK = 1 << 16  # bytes of a log that one answer holds
_PARENT_ENV = "RILLFLOW_PARENT"  # a role's process ends when this one has gone
_LOOK = 1.0


class RoleHost:
    """Hosts one process at a time, `name` of the run `run`. All methods return within moments."""

    program = (sys.executable, "-m", "rillflow")

    def __init__(self, name: str, run: str, log: str = "log", linger: float = 0.0) -> None:
        """`log` is another one for each driver of the run. With `linger`, the actor exits that number of seconds after
        its process: for detached actors."""
        self._folder = own_folder(run) / name
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._log = self._folder / f"{log}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._looking = threading.Lock()
        if linger:
            threading.Thread(target=self._expire, args=(linger,), name="linger", daemon=True).start()

    def folder(self) -> str:
        """Return the process's folder; it stays for the next process of this name on this host."""
        return str(self._folder)

    def free_port(self, address: str) -> int:
        """Return a free port for the ranks' rendezvous. If another process takes it meanwhile, the ranks restart."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def start(self, spec: str) -> int:
        """Start `rillflow ARGUMENTS…` and return the id of its process.

        `spec`: {"arguments": [...], "environment": {...} (added to the actor's), "cwd": …, where this host has it}.
        """
        wanted: dict[str, Any] = json.loads(spec)
        if self._process is not None and self.running():
            raise RunError(f"a process runs here already (id {self._process.pid})", "end it first")
        arguments = [word.replace(FOLDER, str(self._folder)) for word in wanted["arguments"]]
        cwd = wanted.get("cwd", "")
        with open(self._log, "ab") as output:
            self._process = subprocess.Popen(
                [*self.program, *arguments],
                cwd=cwd if os.path.isdir(cwd) else self._folder,
                env=dict(os.environ) | wanted["environment"] | {_PARENT_ENV: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self._process.pid

    def look(self, log: str, offset: int) -> str:
        """Return the process's exit code (null while it runs) and the next piece of its output, decoded as latin-1.

        `log` and `offset` are those of the last answer; a log that has been replaced since is read from its beginning.
        """
        code = self._code()  # before the log, so that the log is read to its end after the process has ended
        if not self._log.exists():
            return json.dumps({"code": code, "log": "", "offset": 0, "text": "", "more": False})
        with open(self._log, "rb") as file:
            status = os.fstat(file.fileno())
            now = f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"
            begin = offset if log == now and offset <= status.st_size else 0
            file.seek(begin)
            text = file.read(CHUNK)
        end = begin + len(text)
        more = end < status.st_size
        return json.dumps({"code": code, "log": now, "offset": end, "text": text.decode("latin-1"), "more": more})

    def tail(self) -> str:
        """Return the end of its output."""
        if not self._log.exists():
            return ""
        with open(self._log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - CHUNK))
            return file.read(CHUNK).decode(errors="replace")

    def signal(self, number: int) -> None:
        """Signal the process group."""
        if self._process is not None and self.running():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def running(self) -> bool:
        return self._process is not None and self._code() is None

    def forget(self) -> None:
        """Remove the folder of a process that will not come back."""
        self.signal(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _code(self) -> int | None:
        with self._looking:
            if self._process is None:
                return None
            known = self._process.returncode is not None
            code = self._process.poll()
            if code is not None and not known:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # its remaining children
            return code

    def _expire(self, linger: float) -> None:
        """End an actor whose process has ended, or that never got one."""
        last = time.monotonic()
        while time.monotonic() - last < linger:
            time.sleep(_LOOK)
            if self.running():
                last = time.monotonic()
        self.forget()
        os._exit(0)


def own_folder(run: str) -> Path:
    """Return the folder of this user's processes of a run on this host, closed to others."""
    parent = Path(tempfile.gettempdir()) / f"rillflow-{os.getuid()}"
    for path in (parent, parent / run):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise RunError(
                f"{path} is open to other users, or belongs to one", "remove it, or set TMPDIR to another folder"
            )
    return parent / run
