"""The tests' side of a grading. The candidate's objects appear here only as numbers: calls go out as plain values and
plain values come back, so the candidate's code can neither compare, patch nor inspect anything here.

Each result is sent at once, with the nonce that only this process knows. An object of the candidate is equal only to
itself and is neither true nor false.
"""

from __future__ import annotations

import ast
import builtins
import random
import socket
import sys
from collections.abc import Callable
from typing import Any

from .values import NotPlain, Ref, pack, receive, send, unpack

GONE = "the candidate is gone"
_LONGEST = 1 << 20  # bytes of an answer
_ROOM = 20  # levels that tests may put around an answer before it is too deep to be sent back


class CandidateFailed(Exception):
    """The candidate raised an unknown exception, or sent something that is not an answer."""


class CandidateGone(BaseException):
    """The candidate's process is gone. No test that needs it can pass, whatever the test catches."""


class Unsendable(BaseException):
    """A test passes the candidate a value that cannot be sent. This is a fault of the tests."""


class Remote(Ref):
    """An object in the candidate's process: a function, or an instance whose attributes can be used."""

    __slots__ = ("_rillflow_ask",)

    def __init__(self, number: int, ask: Callable[[list[Any]], Any]) -> None:
        object.__setattr__(self, "_rillflow_number", number)
        object.__setattr__(self, "_rillflow_ask", ask)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._rillflow_ask(["call", self, arguments, keywords])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._rillflow_ask(["get", self, name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._rillflow_ask(["set", self, name, value])

    def __bool__(self) -> bool:
        raise TypeError("an object of the candidate is neither true nor false; compare a plain value")


def be_judge(channel: socket.socket, task: dict[str, Any]) -> int:
    """Run the tests against the candidate at the other end of the line, and report each result."""
    random.seed(0)
    line = Line(task["line"])
    for index, test in enumerate(_results(task, line.ask)):
        send(channel, pack([task["nonce"], index, _fault(test, line)]))
    return 0


class Line:
    """The line to the candidate: one request, one answer. A broken line stays broken."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.gone = False

    def ask(self, request: list[Any]) -> Any:
        try:
            body = pack(request)
        except NotPlain as error:
            raise Unsendable(str(error)) from None
        try:
            send(self._line, body)
            answer = receive(self._line, _LONGEST)
        except (EOFError, OSError):
            self.gone = True
        if self.gone:
            raise CandidateGone
        try:
            kind, *rest = unpack(answer, ref=lambda number: Remote(number, self.ask), depth=_ROOM)
            if kind == "value":
                return rest[0]
            name, text = (rest[0], rest[1]) if kind == "raised" else ("NameError", "the candidate has no such name")
        except (NotPlain, RecursionError, TypeError, ValueError, IndexError) as error:
            raise CandidateFailed(f"no answer: {error}") from None
        if not isinstance(name, str) or not isinstance(text, str):
            raise CandidateFailed("no answer: an exception without a name")
        raise _error(name, f"{name}: {text}")


def _error(name: str, text: str) -> Exception:
    """Return the candidate's exception as the builtin type of that name.

    Exceptions that would silently end a loop of the tests (`all(map(…))`), and groups, become CandidateFailed.
    """
    known = vars(builtins).get(name)
    if not isinstance(known, type) or not issubclass(known, Exception):
        return CandidateFailed(text)
    if issubclass(known, StopIteration | StopAsyncIteration | BaseExceptionGroup):
        return CandidateFailed(text)
    try:
        return known(text)
    except TypeError:  # it needs more than a text, as UnicodeDecodeError does
        error: Exception = known.__new__(known, text)
        error.args = (text,)
        return error


def _fault(test: Callable[[], Any], line: Line) -> str:
    """Return why the test failed, or an empty string. A test whose candidate is gone has failed, whatever it caught."""
    try:
        test()
    except Unsendable as error:
        return f"a value cannot be sent: {error}"
    except BaseException as error:
        return GONE if line.gone else _words(error)
    return GONE if line.gone else ""


def _words(error: BaseException) -> str:
    """Return an exception as text, even if its value cannot be formatted (an integer with too many digits)."""
    try:
        return f"{type(error).__name__}: {error}"[:300].rstrip(": ")
    except Exception:
        return type(error).__name__


def _results(task: dict[str, Any], ask: Callable[[list[Any]], Any]) -> list[Callable[[], Any]]:
    """Return the tests as functions that raise if they fail."""
    if task["kind"] == "cases":
        return [_case(ask, *case) for case in task["cases"]]
    sources = [task["setup"], *task["tests"]]
    scope: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    prepared: list[str] = []

    def prepare() -> None:
        """Run the given code, bind the candidate's names and run the setup, once; an error fails each test."""
        if not prepared:
            exec(compile(task["given"], "given.py", "exec"), scope)
            scope.update(_names(sources, task["entry_point"], _given(scope), ask))
            exec(compile(task["setup"], "setup.py", "exec"), scope)
            prepared.append("yes")

    def run(source: str) -> Callable[[], Any]:
        def test() -> None:
            prepare()
            exec(compile(source, "test.py", "exec"), scope)
            if task["kind"] == "check":
                scope["check"](scope[task["entry_point"]])

        return test

    return [run(source) for source in task["tests"]]


def _case(
    ask: Callable[[list[Any]], Any], name: str, arguments: Any, keywords: Any, expected: Any
) -> Callable[[], Any]:
    def test() -> None:
        found = ask(["name", name])
        value = found(*arguments, **keywords)
        if isinstance(value, Ref) or not value == expected:
            raise AssertionError(f"{value!r:.100} is not what was expected")

    return test


def _given(scope: dict[str, Any]) -> set[str]:
    """Return the names that a candidate cannot replace: all that the given code defines, except its classes.

    Instances of these classes are passed to the candidate, so the candidate's own classes are used.
    """
    return {
        name for name, value in scope.items() if not (isinstance(value, type) and value.__module__ == scope["__name__"])
    }


def _names(sources: list[str], entry_point: str, given: set[str], ask: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Return the values of names that neither the tests nor the given code define: the candidate's objects, or modules
    of the standard library.

    A builtin is taken from the candidate only if it is the entry point, so a candidate cannot replace `set` or `len` in
    the tests. The set of names depends only on the tests.
    """
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    free = _free(nodes) - given
    entry_point = entry_point or _called_first(nodes, free)
    bound: dict[str, Any] = {}
    for name in sorted(free | {entry_point}):
        if hasattr(builtins, name) and name != entry_point:
            continue
        if name in sys.stdlib_module_names and _only_as_module(name, nodes):
            bound[name] = __import__(name)
            continue
        try:
            bound[name] = ask(["name", name])
        except NameError:
            continue
    return bound


def _called_first(nodes: list[ast.AST], free: set[str]) -> str:
    """Return the function under test: the first called name that is not a builtin, or else the first called name."""
    calls = [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    calls = [name for name in calls if name in free]
    return next((name for name in calls if not hasattr(builtins, name)), calls[0] if calls else "")


def _free(nodes: list[ast.AST]) -> set[str]:
    read: set[str] = set()
    defined: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
    return read - defined


def _only_as_module(name: str, nodes: list[ast.AST]) -> bool:
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in nodes)
    dotted = sum(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name for node in nodes
    )
    return uses == dotted
