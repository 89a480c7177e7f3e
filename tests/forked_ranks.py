"""Runs a script's `main(rank, ranks, rendezvous, *arguments)` in ranks that are forked once its imports are done.

    python forked_ranks.py SCRIPT RANKS LOGS ARGUMENT…

The launcher is the product's; ranks write to `LOGS/rank0.log`, `LOGS/rank1.log`, ….
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forked_command import fork_python
from rillflow.runtime.forkserver import write_to
from rillflow.trainer.parallel.launch import launch

if TYPE_CHECKING:
    from commands import Warm


class ForkedRank:
    """As of `subprocess.Popen`: poll, wait, kill, terminate."""

    def __init__(self, run: Callable[[], None], log_path: Path | None) -> None:
        def begin() -> None:
            write_to(log_path)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            run()

        self._process = multiprocessing.get_context("fork").Process(target=begin)
        self._process.start()
        self.kill, self.terminate = self._process.kill, self._process.terminate

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode


def main(script: str, ranks: int, logs: Path, *arguments: str) -> int:
    sys.path.insert(0, str(Path(script).parent))
    run = runpy.run_path(script)["main"]
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"

    def start(words: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> ForkedRank:
        return ForkedRank(lambda: run(int(words[0]), ranks, words[1], *arguments), log_path)

    return launch(lambda rank, at: [str(rank), at], ranks, os.environ, lambda rank: logs / f"rank{rank}.log", start)


def run_ranks(script: Path, ranks: int, logs: Path, *arguments: str, warm: Warm | None = None) -> None:
    """Run the ranks in a process of their own, forked from the warm one if that is given; all must end well."""
    words = [__file__, str(script), str(ranks), str(logs), *arguments]
    path = "" if warm is None else warm.path()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    code = fork_python(path, words, environment, logs / "rank.log").wait(500)
    said = "".join(path.read_text() for path in sorted(logs.glob("rank*.log")))
    assert code == 0, said


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))
