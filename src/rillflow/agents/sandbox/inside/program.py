"""The untrusted code in its process: a whole program, or a candidate whose functions are called.

A program runs as `__main__`, and its end is reported. A candidate's code runs once, then its functions are called by
name or number. Nothing that this process sends is trusted: a report is only shown, and values are plain bytes, which
the judge compares in another process.
"""

from __future__ import annotations

import ast
import os
import socket
import sys
import traceback
import types
from typing import Any

from .values import pack, receive, send, unpack

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


_KEPT = 10_000  # most objects that the judge may refer to


def be_candidate(channel: socket.socket, task: dict[str, Any]) -> int:
    """Run the candidate's code and answer the judge's requests; return the exit code."""
    module = fresh_module("candidate")
    kept: list[Any] = []

    def keep(value: Any) -> int:
        if len(kept) >= _KEPT:
            raise ValueError("too many objects are kept for the tests")
        kept.append(value)
        return len(kept) - 1

    try:
        exec(compile(task["code"], "candidate.py", "exec"), module.__dict__)
    except BaseException as error:
        show(error)
        sys.stderr.flush()
        send(channel, pack(f"{type(error).__name__}: {error}"[:500]))
        return 1
    send(channel, pack({"defined": True}))
    line = task["line"]
    while True:
        try:
            request = unpack(receive(line), ref=kept.__getitem__)
        except EOFError:
            return 0
        send(line, _answer(request, module, keep))


def _answer(request: list[Any], module: Any, keep: Any) -> bytes:
    """Return the value of one request, or the name of the exception that it raised."""
    try:
        kind, subject, *rest = request
        if kind == "name":
            if subject not in module.__dict__:
                return pack(["missing"])
            value = module.__dict__[subject]
        elif kind == "call":
            value = subject(*rest[0], **rest[1])
        elif kind == "get":
            value = getattr(subject, rest[0])
        else:
            setattr(subject, *rest)
            value = None
        return pack(["value", value], keep)
    except Exception as error:
        return pack(["raised", type(error).__name__, str(error)[:500]])
