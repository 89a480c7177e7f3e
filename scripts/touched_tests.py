"""Select the plain tests that a change touches, nearest first, within a time budget; say why, and what is left out.

    python -m scripts.touched_tests                    # print the selection
    python -m scripts.touched_tests --run              # and run it
    python -m scripts.touched_tests --base HEAD~3 --seconds 60

A test file is touched if it has changed, or if its imports reach a changed module in at most REACH steps. Imports are
read, not executed: code that a test reaches only through processes that it starts is found by `make test` alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "bench", "scripts")
REACH = 3  # steps of imports; farther ones reach nearly every test
UNKNOWN = 4.0  # seconds of a test file without a recorded duration: about the mean of all
WORKERS = 2
SLOW_MARKS = {"slow", "chaos", "engines", "oracle", "agents", "trackers"}
DURATIONS = ROOT / ".pytest_cache" / "v" / "rillflow" / "durations"  # written by tests/durations.py
SHOWN = 12  # names of test files that are left out


@dataclass(frozen=True)
class Touched:
    """A test file that a change touches."""

    path: str
    steps: int
    why: str
    beside: bool  # whether its folder is that of a changed module


@dataclass
class Selection:
    chosen: list[Touched]
    left_out: list[Touched]
    slow: list[Touched] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- imports


def module_of(path: Path) -> str:
    """Return the name by which a file is imported. Tests and their helpers are imported by the file's name."""
    parts = path.with_suffix("").parts
    if parts[0] == "tests":
        return ".".join(parts) if parts[-1] == "conftest" else parts[-1]
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield every import that may be executed, also those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _statements(child)


def _imported(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each import; the name is empty for `import module` and for pytest's plugins."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytest_plugins":
            yield from ((name, "") for name in ast.literal_eval(node.value))
    for statement in _statements(tree):
        if isinstance(statement, ast.Import):
            yield from ((alias.name, "") for alias in statement.names)
            continue
        base = package.rsplit(".", statement.level - 1)[0] if statement.level else ""
        module = ".".join(part for part in (base, statement.module) if part)
        yield from ((module, alias.name) for alias in statement.names)


class Imports:
    """The files of a tree and which of them import which."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = [path for name in FOLDERS for path in sorted((root / name).rglob("*.py"))]
        self.paths = {module_of(path.relative_to(root)): str(path.relative_to(root)) for path in files}
        self.texts = {path: (root / path).read_text() for path in self.paths.values()}
        self.trees = {path: ast.parse(text, path) for path, text in self.texts.items()}
        self._exports = {
            module: dict(self._exported(module)) for module, path in self.paths.items() if path.endswith("__init__.py")
        }
        self.importers: dict[str, set[str]] = {}
        for module, path in self.paths.items():
            for target in self._targets(module, path):
                self.importers.setdefault(target, set()).add(path)

    def _package(self, module: str) -> str:
        return module if self.paths[module].endswith("__init__.py") else module.rpartition(".")[0]

    def _exported(self, module: str) -> Iterator[tuple[str, str]]:
        for origin, name in _imported(self.trees[self.paths[module]], self._package(module)):
            if name:
                yield name, origin

    def _targets(self, module: str, path: str) -> Iterator[str]:
        """Yield the modules that a file depends on.

        A name that a package hands on leads to the module that defines it, not to all that the package imports.
        """
        for origin, name in _imported(self.trees[path], self._package(module)):
            origin_name = origin.removeprefix("tests.")
            if f"{origin_name}.{name}" in self.paths:
                yield f"{origin_name}.{name}"
            elif defined := self._exports.get(origin_name, {}).get(name):
                yield from (defined, f"{origin_name}.__init__")
            else:
                yield origin_name
        if path.startswith("tests/"):
            for folder in Path(path).parents[:-1]:
                if f"{folder}/conftest.py" != path:
                    yield ".".join((*folder.parts, "conftest"))

    def reaching(self, changed: str, reach: int) -> dict[str, tuple[int, str]]:
        """Return the files that import a changed module, each with its steps and the last module on the way.

        All tests of a folder use its conftest.py: they count as the farthest.
        """
        start = module_of(Path(changed))
        found: dict[str, tuple[int, str]] = {}
        queue = deque([(start, 0), (f"{start}.__init__", 0)])
        seen = {start}
        while queue:
            module, steps = queue.popleft()
            if steps == reach:
                continue
            farther = reach if module.endswith("conftest") else steps + 1
            for path in sorted(self.importers.get(module, ())):
                importer = module_of(Path(path))
                if importer not in seen:
                    seen.add(importer)
                    through = "" if steps == 0 else f" through {module}"
                    found[path] = (farther, f"imports {start}{through}")
                    queue.append((importer, farther))
        return found

    def is_slow(self, path: str) -> bool:
        """Return whether all tests of a file have a mark that plain runs leave out."""
        for node in self.trees[path].body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                return bool(
                    SLOW_MARKS & {part.attr for part in ast.walk(node.value) if isinstance(part, ast.Attribute)}
                )
        return False


# ---------------------------------------------------------------- selection


def is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_") and path.endswith(".py")


def _beside(test: str, changed: str) -> bool:
    """Return whether a test lies in the folder that mirrors a changed module's, or in one below it."""
    parts = Path(changed).parts
    if parts[:2] != ("src", "rillflow"):
        return Path(test).parent == Path(changed).parent
    return Path(test).is_relative_to(Path("tests", "unit", *parts[2:-1])) and len(parts) > 3


def _naming(imports: Imports, changed: str) -> dict[str, tuple[int, str]]:
    """Return the tests that name a file which they do not import: a script, a recipe, a page."""
    path = Path(changed)
    names = [path.name] if path.suffix else []
    if path.parts[0] == "recipes":
        names.append(f'"{path.stem}"')
    return {
        test: (1, f"names {name}")
        for test, text in imports.texts.items()
        for name in names
        if is_test(test) and name in text
    }


def touched(imports: Imports, changed: Iterable[str], reach: int = REACH) -> tuple[list[Touched], list[str]]:
    """Return the touched test files, nearest first, and the changed files that reach no test."""
    best: dict[str, Touched] = {}
    unreached = []
    for path in changed:
        found: dict[str, tuple[int, str]] = {path: (0, "changed")} if path in imports.paths.values() else {}
        if path.endswith(".py"):
            found |= imports.reaching(path, reach)
        if not path.startswith(("src/rillflow/", "bench/")) or not path.endswith(".py"):
            found = _naming(imports, path) | found
        tests = {test: near for test, near in found.items() if is_test(test)}
        if not tests:
            unreached.append(path)
        for test, (steps, why) in tests.items():
            one = Touched(test, steps, why, _beside(test, path))
            if test not in best or _rank(one) < _rank(best[test]):
                best[test] = one
    return sorted(best.values(), key=_rank), unreached


def _rank(one: Touched) -> tuple[int, bool, str]:
    return one.steps, not one.beside, one.path


def select(
    imports: Imports, changed: Iterable[str], seconds: dict[str, float], budget: float, reach: int = REACH
) -> Selection:
    """Take the nearest tests until the budget is spent. Tests that have changed themselves are always taken."""
    everything, unreached = touched(imports, changed, reach)
    selection = Selection([], [], unreached=unreached)
    spent = 0.0
    for one in everything:
        cost = seconds.get(one.path, UNKNOWN) / WORKERS
        if imports.is_slow(one.path):
            selection.slow.append(one)
        elif one.steps == 0 or spent + cost <= budget:
            selection.chosen.append(one)
            spent += cost
        else:
            selection.left_out.append(one)
    return selection


def recorded(path: Path = DURATIONS) -> dict[str, float]:
    """Return the seconds of each test file, from the durations of the tests in earlier runs."""
    if not path.is_file():
        return {}
    found: dict[str, float] = {}
    for test, seconds in json.loads(path.read_text()).items():
        name = test.partition("::")[0]
        found[name] = found.get(name, 0.0) + seconds
    return found


# ---------------------------------------------------------------- the change


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def base_of(named: str | None) -> str:
    """Return the commit to compare with: the named one, else where the branch left main, else HEAD."""
    if named:
        found = _git("rev-parse", "--verify", f"{named}^{{commit}}")
        if not found:
            sys.exit(f"touched_tests: git knows no commit {named!r}")
        return found
    return _git("merge-base", "HEAD", "main") or _git("merge-base", "HEAD", "origin/main") or _git("rev-parse", "HEAD")


def changed_since(base: str) -> list[str]:
    """Return the files that differ from the base: committed, staged, edited, deleted and new ones."""
    names = _git("diff", "--name-only", base).splitlines()
    return sorted({*names, *_git("ls-files", "--others", "--exclude-standard").splitlines()})


def report(selection: Selection, seconds: dict[str, float], budget: float) -> None:
    width = max((len(one.path) for one in selection.chosen), default=0)
    for one in selection.chosen:
        took = f"{seconds[one.path]:5.1f} s" if one.path in seconds else "not recorded"
        print(f"  {one.path:<{width}}  {took:>12}  {one.why}")
    total = sum(seconds.get(one.path, UNKNOWN) for one in selection.chosen) / WORKERS
    print(f"selected {len(selection.chosen)} test files, about {total:.0f} of {budget:.0f} s with {WORKERS} workers")
    if selection.left_out:
        rest = sum(seconds.get(one.path, UNKNOWN) for one in selection.left_out) / WORKERS
        print(f"left out {len(selection.left_out)} files that reach the change from farther away (about {rest:.0f} s):")
        print("  " + "\n  ".join(one.path for one in selection.left_out[:SHOWN]))
        if len(selection.left_out) > SHOWN:
            print(f"  and {len(selection.left_out) - SHOWN} more: `make test` runs them all")
    if selection.slow:
        print(f"left out {len(selection.slow)} files whose marks plain runs leave out (`make test-slow` and the like):")
        print("  " + "\n  ".join(one.path for one in selection.slow[:SHOWN]))
    if selection.unreached:
        print("no test imports or names: " + ", ".join(selection.unreached))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="compare with this commit instead of the one where the branch left main")
    parser.add_argument("--seconds", type=float, default=150.0, help="budget for the tests (default %(default)s)")
    parser.add_argument("--reach", type=int, default=REACH, help="steps of imports (default %(default)s)")
    parser.add_argument("--run", action="store_true", help="run the selected tests")
    options = parser.parse_args()
    base = base_of(options.base)
    changed = changed_since(base)
    print(f"{len(changed)} files have changed since {_git('log', '-1', '--format=%h %s', base)}")
    seconds = recorded()
    selection = select(Imports(ROOT), changed, seconds, options.seconds, options.reach)
    report(selection, seconds, options.seconds)
    if not options.run or not selection.chosen:
        return 0
    workers = [] if len(selection.chosen) == 1 else ["-n", str(WORKERS), "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", "-q", *workers, *(one.path for one in selection.chosen if _there(one))]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if code == 5 else code  # 5: every selected test has a mark that plain runs leave out


def _there(one: Touched) -> bool:
    return (ROOT / one.path).is_file()


if __name__ == "__main__":
    sys.exit(main())
