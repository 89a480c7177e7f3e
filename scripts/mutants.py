"""Change the source in small ways, one at a time, and see whether the tests notice.

    python -m scripts.mutants --count 60 --seed 0 --json before.json       # sample, run, record
    python -m scripts.mutants --mutants before.json --json after.json      # the same mutants on another tree

A mutant is killed if a test fails with it that passes without it, or if tests do not end in time that do without it. A
test that fails or hangs either way makes the mutant "unsteady", which counts for nothing. Each mutant runs in a copy of
the tree, never in place. Tests are those that executed the line (`--coverage`, recorded by `make coverage`),
else the nearest ones of `scripts/touched_tests.py`.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import psutil

from scripts.touched_tests import ROOT, Imports, touched

# Code that runs in other environments or on GPUs, where no plain test can see it.
ELSEWHERE = (
    "kernels/delta/gpu/",
    "engine/servers/inside/rillflow_channel",
    "engine/servers/inside/rillflow_sglang",
)
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One small change of a source file; `line` and `text` (the line's source) find it again in another tree."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    text: str
    column: int
    status: str = ""  # killed, survived, timeout, no test, gone, unsteady
    test: str = ""
    tests: int = 0
    seconds: float = 0.0


# ---------------------------------------------------------------- making mutants


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind, changed node) for one node of a syntax tree. The new node shares its parts with the old one."""
    match node:
        case ast.Compare(left=left, ops=[op, *ops], comparators=right) if type(op) in COMPARISONS:
            yield "comparison", ast.Compare(left, [COMPARISONS[type(op)](), *ops], right)
        case ast.BoolOp(op=op, values=values):
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "removed not", operand
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            yield "arithmetic", ast.BinOp(left, ast.Sub() if isinstance(op, ast.Add) else ast.Add(), right)
        case ast.Constant(value=bool() as value):
            yield "boolean", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield "constant", ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in SWAPPED:
            yield "swapped call", ast.Call(ast.Name(SWAPPED[name]), args, keywords)
        case ast.Return() | ast.Continue() | ast.Break() | ast.Raise():
            yield f"dropped {type(node).__name__.lower()}", ast.Pass()
        case ast.ExceptHandler(type=ast.expr() as caught) if ast.unparse(caught) not in ("Exception", "BaseException"):
            yield "wider except", ast.Name("Exception")


def _nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that are executed as they stand: no annotation, no f-string (whose positions are wrong)."""
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        yield node
        hidden: list[ast.AST | None] = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            hidden += node.body
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Literal", "Annotated"):
            continue
        queue += [child for child in ast.iter_child_nodes(node) if child not in hidden]


class Source:
    """The text of a file, addressed as syntax trees do: lines from 1, columns in bytes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self._starts = [0, *itertools.accumulate(map(len, self.lines))]

    def at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its lines."""
    source, found = Source(text), []
    for node in _nodes(ast.parse(text)):
        for kind, changed in _changes(node):
            place = node.type if isinstance(node, ast.ExceptHandler) else node
            assert isinstance(place, ast.expr | ast.stmt)
            assert place.end_lineno is not None
            assert place.end_col_offset is not None
            start, end = (
                source.at(place.lineno, place.col_offset),
                source.at(place.end_lineno, place.end_col_offset),
            )
            line = source.lines[place.lineno - 1].strip()
            found.append(
                Mutant(file, place.lineno, kind, text[start:end], ast.unparse(changed), line, place.col_offset)
            )
    return sorted(found, key=lambda one: (one.line, one.column, one.kind))


def mutated(text: str, mutant: Mutant) -> str:
    """Return the text with the mutant in it."""
    start = Source(text).at(mutant.line, mutant.column)
    assert text.startswith(mutant.before, start), mutant
    plain = mutant.kind.startswith("dropped") or mutant.kind in ("constant", "boolean")
    changed = text[:start] + (mutant.after if plain else f"({mutant.after})") + text[start + len(mutant.before) :]
    ast.parse(changed)
    return changed


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    everything: list[Mutant] = []
    for path in sorted((root / "src" / "rillflow").rglob("*.py")):
        name = str(path.relative_to(root))
        if not any(part in name for part in ELSEWHERE):
            everything += mutants_of(name, path.read_text())
    chosen = random.Random(seed).sample(everything, min(count, len(everything)))
    return sorted(chosen, key=lambda one: (one.file, one.line, one.column))


def located(root: Path, recorded: Mutant) -> Mutant | None:
    """Return a recorded mutant at its place in this tree: the same change on the same line of source, the nearest."""
    path = root / recorded.file
    if not path.is_file():
        return None
    same = [
        one
        for one in mutants_of(recorded.file, path.read_text())
        if (one.kind, one.before, one.text) == (recorded.kind, recorded.before, recorded.text)
    ]
    return min(same, key=lambda one: (abs(one.line - recorded.line), abs(one.column - recorded.column)), default=None)


# ---------------------------------------------------------------- choosing tests


def tests_by_coverage(data_file: Path, most: int) -> Callable[[Mutant], list[str]]:
    """Return a function that names the tests which executed a mutant's line, those of the mirrored folder first."""
    from coverage import CoverageData

    data = CoverageData(str(data_file))
    data.read()

    def tests(mutant: Mutant) -> list[str]:
        contexts = data.contexts_by_lineno(mutant.file).get(mutant.line, [])
        names = {context.partition("|")[0] for context in contexts if "::" in context}
        folder = str(Path("tests/unit", *Path(mutant.file).parts[2:-1]))
        return sorted(names, key=lambda name: (not name.startswith(folder), name))[:most]

    return tests


def tests_by_imports(imports: Imports, most: int) -> Callable[[Mutant], list[str]]:
    """Return a function that names the nearest test files."""

    def tests(mutant: Mutant) -> list[str]:
        found, _ = touched(imports, [mutant.file])
        return [one.path for one in found if not imports.is_slow(one.path)][:most]

    return tests


# ---------------------------------------------------------------- running


class Copies:
    """Copies of a tree, one for each worker, in which mutants are tried."""

    def __init__(self, root: Path, folder: Path, count: int, seconds: float) -> None:
        self._root = root
        self._seconds = seconds
        self._free: SimpleQueue[Path] = SimpleQueue()
        self._steady: dict[tuple[str, ...], bool] = {}
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout
        for number in range(count):
            tree = folder / f"tree{number}"
            for name in filter(None, names.split("\0")):
                if (root / name).is_file():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / name, tree / name)
            self._free.put(tree)

    def _pytest(self, tree: Path, tests: list[str], seconds: float) -> tuple[int | None, str]:
        """Return pytest's exit code (None if it did not end in time) and what it wrote."""
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("COVERAGE_PROCESS_CONFIG", None)  # lines that a mutant executes do not count as covered
        environment.setdefault("RILLFLOW_DATA", str(self._root.parent / "shared" / "data"))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
            finally:
                with suppress(ProcessLookupError):  # also what a test left behind in the same process group
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
            output.seek(0)
            return code, output.read()

    def run(self, mutant: Mutant, tests: list[str]) -> Mutant:
        """Return the mutant with what became of it."""
        if not tests:
            return replace(mutant, status="no test")
        tree, began = self._free.get(), time.monotonic()
        try:
            path = tree / mutant.file
            source = path.read_text()
            path.write_text(mutated(source, mutant))
            try:
                code, output = self._pytest(tree, tests, self._seconds)
            finally:
                path.write_text(source)
            status, test = self._verdict(tree, tests, code, output)
        finally:
            self._free.put(tree)
        return replace(
            mutant, status=status, test=test, tests=len(tests), seconds=round(time.monotonic() - began, 1)
        )  # fmt: skip

    def _verdict(self, tree: Path, tests: list[str], code: int | None, output: str) -> tuple[str, str]:
        if code is None:
            return ("timeout" if self._passes(tree, *tests) else "unsteady"), ""
        if code == 0:
            return "survived", ""
        if code == 5:  # every test is left out of plain runs
            return "no test", ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", output, re.MULTILINE)
        test = failed[1] if failed else ""
        if not test:  # pytest itself broke, before any test: the mutant is in what conftest.py imports
            return (
                ("killed", "(start of pytest)")
                if self._passes(tree, "tests/unit/test_borders.py")
                else ("unsteady", "")
            )
        return ("killed" if self._passes(tree, test) else "unsteady"), test

    def _passes(self, tree: Path, *tests: str) -> bool:
        """Return whether tests pass in time without a mutant."""
        if tests not in self._steady:
            self._steady[tests] = self._pytest(tree, list(tests), self._seconds)[0] == 0
        return self._steady[tests]


# ---------------------------------------------------------------- the command


def _shown(one: Mutant) -> str:
    change = f"{one.before} -> {one.after}".replace("\n", " ")
    return f"{one.status:<9} {one.file}:{one.line}  {one.kind}: {change[:80]}  {one.test}"


def _table(mutants: list[Mutant]) -> None:
    print("\n".join(map(_shown, mutants)))
    counts = Counter(one.status for one in mutants)
    judged = [one for one in mutants if one.status not in ("gone", "unsteady")]
    killed = counts["killed"] + counts["timeout"]
    print(", ".join(f"{name} {count}" for name, count in counts.most_common()))
    print(f"killed {killed} of {len(judged)}" + (f" ({100 * killed / len(judged):.0f} %)" if judged else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="mutants to sample (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutants", type=Path, help="run the mutants of this JSON file instead of a sample")
    parser.add_argument("--coverage", type=Path, help="coverage data with contexts, such as .coverage")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit for each mutant (default %(default)s)")
    parser.add_argument("--files", type=int, default=6, help="test files for each mutant (default %(default)s)")
    parser.add_argument("--tests", type=int, default=60, help="tests for each mutant, with --coverage")
    parser.add_argument("--workers", type=int, default=2, help="mutants at once (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    options = parser.parse_args()
    if options.mutants:
        recorded = [Mutant(**row) for row in json.loads(options.mutants.read_text())]
        found = [(one, located(ROOT, one)) for one in recorded]
        todo = [place for _, place in found if place is not None]
        gone = [replace(one, status="gone", test="", tests=0, seconds=0.0) for one, place in found if place is None]
    else:
        todo, gone = sample(ROOT, options.count, options.seed), []
    if options.list:
        print("\n".join(map(_shown, todo)))
        return 0
    by_imports = tests_by_imports(Imports(ROOT), options.files)
    by_coverage = tests_by_coverage(options.coverage, options.tests) if options.coverage else None
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.workers) as pool:
        copies = Copies(ROOT, Path(folder), options.workers, options.seconds)
        began, results = time.monotonic(), []

        def tried(mutant: Mutant) -> Mutant:
            return copies.run(mutant, (by_coverage(mutant) if by_coverage else []) or by_imports(mutant))

        for one in pool.map(tried, todo):
            results.append(one)
            each = (time.monotonic() - began) / len(results)
            left = each * (len(todo) - len(results)) / 60
            print(f"{len(results)}/{len(todo)} {_shown(one)} ({left:.0f} minutes left)", flush=True)
    results += gone
    _table(results)
    took = time.monotonic() - began
    print(f"{len(todo)} mutants took {took / 60:.1f} minutes; 60 take about {took / max(1, len(todo)):.0f} minutes")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
