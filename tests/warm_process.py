"""The warm process of the tests: `rillflow warm`, which has imported Rillflow and loaded its kernels too.

Tests start hundreds of processes of the same code. All of them are forked from this one: commands, every process of a
run (by itself `rillflow run` forks only those that need torch), and other programs that import torch. What a process
imports by itself is tested by tests/unit/runtime/test_light_processes.py and tests/integration/test_run.py.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, get_args

import setproctitle

from forked_command import NAMESPACE, PYTHON
from rillflow.resources.placement import Role
from rillflow.runtime import forkserver, local, preloaded, warm
from rillflow.runtime.process import leave

PR_SET_PDEATHSIG = 1
become_rillflow = forkserver.become  # which this program replaces
MODULES = (
    *warm.MODULES,
    *warm.SHARED_MODULES,
    *(module for modules in preloaded.ROLE_MODULES.values() for module in modules),
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "rillflow.cli.fit",
    "rillflow.cli.run",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)


def preload() -> None:
    """Import what processes need and load the machine code of the kernels. Afterwards there is one thread again."""
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    load_kernels()
    gc.enable()
    gc.freeze()


def load_kernels() -> None:
    import torch

    from rillflow.trainer.fused import compile_ahead
    from rillflow.weights.delta import Ahead

    torch.set_num_threads(1)  # a fork has none of the other threads
    compile_ahead().join()
    for dtype in (torch.bfloat16, torch.float32):
        Ahead(dtype, torch.device("cpu"), reads=True).wait(600)


def become(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Turn a process that was just forked into `rillflow ARGUMENTS` or `python ARGUMENTS`, and end it.

    The interpreter's own end would copy all memory that is shared with the warm process.
    """
    code = 1
    try:
        (run_python if arguments[0] == PYTHON else become_rillflow)(arguments, environment)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    leave(code)


def run_python(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    words = list(arguments[1:])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    setproctitle.setproctitle(" ".join([sys.executable, *words]))
    os.environ.clear()
    os.environ.update(environment)
    if space := os.environ.pop(NAMESPACE, ""):
        enter(space)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = os.getcwd()
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def enter(space: str) -> None:
    """Move this process into a network namespace, as `ip netns exec` does."""
    with open(f"/var/run/netns/{space}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {space}")


if __name__ == "__main__":
    warm.preload = preload
    forkserver.become = become
    local._HEAVY = get_args(Role)
    warm.main()
