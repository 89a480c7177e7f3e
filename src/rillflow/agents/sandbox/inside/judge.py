"""The tests' side of a grading. The candidate is here only as numbers of objects in another process: calls go out as
plain values and plain values come back, so nothing of the candidate's can compare, patch or look around here.

Each result goes out at once, with the nonce that only this process was given. An object that stays with the
candidate is never equal to anything but itself and is neither true nor false.
"""

from __future__ import annotations

import ast
import builtins
import random
import socket
import sys
from collections.abc import Callable
from typing import Any

from .frames import receive, send
from .values import NotPlain, Ref, pack, unpack

GONE = "the candidate has gone"
_LONGEST = 1 << 20  # bytes of an answer
_ROOM = 20  # levels that tests may put around an answer: it could not make what they hand back too deep to be sent


class CandidateFailed(Exception):
    """The candidate raised something that has no name here, or answered with something that is no answer."""


class CandidateGone(BaseException):
    """There is no candidate any more: no test that needs it can pass, whatever it catches."""


class Unsendable(BaseException):
    """A test hands the candidate something that cannot be sent: the tests do not fit, nobody's answer is wrong."""


class Remote(Ref):
    """An object in the candidate's process: a function to call, or an instance whose attributes can be used."""

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
    random.seed(0)
    line = Line(task["line"])
    for index, test in enumerate(_results(task, line.ask)):
        send(channel, pack([task["nonce"], index, _fault(test, line)]))
    return 0


class Line:
    """The way to the candidate: one request, one answer. What breaks it once breaks it for good."""

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
    """The candidate's exception as one of the builtin type of that name. Not those that would end a loop of the tests
    as if it were done (`all(map(…))`), nor groups, which hold what did not come along."""
    known = vars(builtins).get(name)
    if not isinstance(known, type) or not issubclass(known, Exception):
        return CandidateFailed(text)
    if issubclass(known, StopIteration | StopAsyncIteration | BaseExceptionGroup):
        return CandidateFailed(text)
    try:
        return known(text)
    except TypeError:  # it wants more than a text, as UnicodeDecodeError does
        error: Exception = known.__new__(known, text)
        error.args = (text,)
        return error


def _fault(test: Callable[[], Any], line: Line) -> str:
    """Why the test failed; empty where it passed. A test whose candidate left has failed, whatever it caught."""
    try:
        test()
    except Unsendable as error:
        return f"what cannot cross the border: {error}"
    except BaseException as error:
        return GONE if line.gone else _words(error)
    return GONE if line.gone else ""


def _words(error: BaseException) -> str:
    """Never a failure of its own: what a test raised may hold a value that cannot be written, as a number of too many
    digits."""
    try:
        return f"{type(error).__name__}: {error}"[:300].rstrip(": ")
    except Exception:
        return type(error).__name__


def _results(task: dict[str, Any], ask: Callable[[list[Any]], Any]) -> list[Callable[[], Any]]:
    """The tests as functions that raise where they fail."""
    if task["kind"] == "cases":
        return [_case(ask, *case) for case in task["cases"]]
    sources = [task["setup"], *task["tests"]]
    scope: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    prepared: list[str] = []

    def prepare() -> None:
        """Run what is given, bind the candidate's names, run the setup, once; a fault in it is a fault of each test."""
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
    """The names that a candidate cannot replace: all that is there before it is asked, but for classes that were
    defined there. Their instances are handed to the candidate, so they are its own."""
    return {
        name for name, value in scope.items() if not (isinstance(value, type) and value.__module__ == scope["__name__"])
    }


def _names(sources: list[str], entry_point: str, given: set[str], ask: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """What the tests mean by names that neither they define nor what is given: the candidate's, or a module of the
    standard library.

    A builtin is the candidate's only where it is the entry point, so a candidate cannot replace `set` or `len` in
    the tests. Which names those are depends on the tests alone.
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
    """The function under test: the first name called that is not a builtin, else the first that is."""
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
