"""Ends process groups when the process that started them dies, however it dies.

The reaper is a small process in its own session, at the other end of a pipe. While the pipe is open it receives which
groups live; when the pipe closes, it kills the groups that are left. It uses the standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress


def kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class Reaper:
    """Watches process groups. A reaper process that was killed is replaced at the next message to it."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group: int) -> None:
        self._groups.add(group)
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Forget a group that has ended: its number may be used again."""
        self._groups.discard(group)
        self._say(f"-{group}\n")

    def close(self) -> None:
        """Kill the groups that are left."""
        for group in self._groups:
            kill_group(group)
        self._groups.clear()
        if self._process is not None:
            with suppress(BrokenPipeError):
                self._process.communicate(timeout=5)
            self._process = None

    def _say(self, word: str) -> None:
        if self._process is None or not _told(self._process, word):
            self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            self._process.wait()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, start_new_session=True
        )
        _told(process, "".join(f"+{group}\n" for group in self._groups))
        return process


def _told(process: subprocess.Popen[bytes], words: str) -> bool:
    assert process.stdin is not None
    try:
        process.stdin.write(words.encode())
        process.stdin.flush()
    except BrokenPipeError:
        with suppress(BrokenPipeError):
            process.stdin.close()
        return False
    return True


def main() -> None:
    """Collect groups until the pipe closes, then kill those that are left."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        kill_group(group)


if __name__ == "__main__":
    main()
