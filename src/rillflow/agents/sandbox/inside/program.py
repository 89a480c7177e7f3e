"""Run a whole program as `__main__` and report how it ended. The report is not trusted; it is only shown."""

from __future__ import annotations

import ast
import os
import socket
import sys
import traceback
import types
from typing import Any

from .frames import send
from .values import pack

_SHOWN = 4000  # characters of a value


def run_program(channel: socket.socket, task: dict[str, Any]) -> int:
    """Write the files, run the program, send its report, and return the exit code."""
    for name, text in task["files"].items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    _feed(task["stdin"])
    sys.path.insert(0, os.getcwd())
    sys.argv = ["program.py"]
    code, said = 0, {"status": "ok", "value": None}
    try:
        said["value"] = _execute(task["code"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        said["status"] = "exit"
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except MemoryError:
        code, said["status"] = 1, "memory"
        print("MemoryError", file=sys.stderr)
    except BaseException as error:
        code, said["status"] = 1, "error"
        show(error)
    sys.stdout.flush()
    sys.stderr.flush()
    send(channel, pack(said))
    return code & 0xFF


def _feed(text: str) -> None:
    """Make standard input an unlinked file; a pipe would block on a long text."""
    path = ".standard-input"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    left = memoryview(text.encode(errors="replace"))
    while left:
        left = left[os.write(file, left) :]
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)


def _execute(code: str) -> str | None:
    """Run the code and return the value of a last expression, as a notebook shows it."""
    module = fresh_module("__main__")
    tree = ast.parse(code, "program.py")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "program.py", "exec"), module.__dict__)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), "program.py", "eval"), module.__dict__)
    return None if value is None else repr(value)[:_SHOWN]


def fresh_module(name: str) -> types.ModuleType:
    """Return an empty module that imports and dataclasses find under its name."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def show(error: BaseException) -> None:
    """Print the traceback without the frames of these files."""
    inner = error.__traceback__
    while inner is not None and os.path.dirname(inner.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        inner = inner.tb_next
    traceback.print_exception(type(error), error, inner, limit=20, chain=False)
