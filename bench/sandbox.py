"""What a check in the sandbox costs: HumanEval's reference solutions against its tests, or tasks of our own where it
is not there.

* ours: the candidate in one sandbox of the warm pool, its tests in another, every value sent between them.
* bwrap: bubblewrap started for each check with a Python that runs candidate and tests in one process: the usual way.
* python: the same in a plain process, without any isolation.

Both peers start the Python installation itself, without the packages of a virtual environment.

Overhead is the wall time of a check beyond that of the same code run in this process, one check at a time. The rate is
that of four checks at a time. Sides take turns, check by check.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

from bench.common import Report, parser
from rillflow.agents.sandbox import Check, Sandbox, SandboxConfig
from rillflow.agents.sandbox.isolation import base_python
from rillflow.dataflow.sources.benchmarks import data_folder

GOAL_OVERHEAD, GOAL_RATE = 25.0, 40.0
_AT_ONCE = 4
_OWN = (
    ("def largest(items):\n    return max(items)\n", "assert candidate([1, 3, 2]) == 3\n", "largest"),
    ("def doubled(text):\n    return text * 2\n", "assert candidate('ab') == 'abab'\n", "doubled"),
)


class Work(NamedTuple):
    code: str
    test: str
    name: str

    @property
    def whole(self) -> str:
        """Candidate and tests as one program."""
        return f"{self.code}\n{self.test}\ncheck({self.name})\n"


def checks(count: int) -> list[Work]:
    path = data_folder() / "code" / "humaneval.jsonl"
    if not path.is_file():
        return [Work(code, f"def check(candidate):\n    {test}", name) for code, test, name in _OWN] * (count // 2)
    rows = [json.loads(line) for line in path.read_text().splitlines()][:count]
    return [Work(row["prompt"] + row["canonical_solution"], row["test"], row["entry_point"]) for row in rows]


def here(work: Work) -> float:
    """Seconds of the same code in this process, which is not the sandbox's cost."""
    started = time.perf_counter()
    exec(compile(work.whole, "check.py", "exec"), {"__name__": "check"})
    return time.perf_counter() - started


def in_process(line: list[str], work: Work) -> float:
    started = time.perf_counter()
    done = subprocess.run([*line, "-c", work.whole], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return time.perf_counter() - started


def bwrap_line() -> list[str]:
    """Return the command that runs Python behind bubblewrap. The installation may lie in a folder that `/tmp` hides."""
    folder, program = map(str, base_python())
    walls = ["--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    return ["bwrap", *walls, "--tmpfs", "/tmp", "--ro-bind", folder, folder, "--clearenv", program]


async def timed(sandbox: Sandbox, one: Work) -> float:
    started = time.perf_counter()
    assert (await sandbox.grade(one.code, Check(one.test, one.name))).ok
    return time.perf_counter() - started


def overhead(side: Callable[[Work], float], work: list[Work]) -> list[float]:
    return [1000 * (side(one) - here(one)) for one in work]


def rate(sandbox: Sandbox, work: list[Work]) -> float:
    async def all_of_them() -> float:
        started = time.perf_counter()
        verdicts = await asyncio.gather(*(sandbox.grade(one.code, Check(one.test, one.name)) for one in work))
        assert all(verdict.ok for verdict in verdicts)
        return len(work) / (time.perf_counter() - started)

    return asyncio.run(all_of_them())


def rate_of(line: list[str], work: list[Work]) -> float:
    """Started four at a time, as the pool runs them."""
    started = time.perf_counter()
    for at in range(0, len(work), _AT_ONCE):
        running = [
            subprocess.Popen([*line, "-c", one.whole], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for one in work[at : at + _AT_ONCE]
        ]
        assert all(process.wait(60) == 0 for process in running)
    return len(work) / (time.perf_counter() - started)


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    work = checks(40 if arguments.quick else 164)
    plain, walled = [str(base_python()[1])], bwrap_line()
    report = Report("sandbox")
    loop = asyncio.new_event_loop()
    with Sandbox(SandboxConfig(running=_AT_ONCE)) as sandbox:

        def ours(one: Work) -> float:
            return loop.run_until_complete(timed(sandbox, one))

        rate(sandbox, work[:8])  # the first runs are not the usual ones
        sides: dict[str, list[float]] = {"ours": [], "bwrap": [], "python": []}
        for one in work:
            sides["ours"] += overhead(ours, [one])
            sides["python"] += overhead(lambda each: in_process(plain, each), [one])
            sides["bwrap"] += overhead(lambda each: in_process(walled, each), [one])
        rates = [(rate(sandbox, work), rate_of(walled, work), rate_of(plain, work)) for _ in range(3)]
        program = [sandbox.run_sync("print(1)").seconds * 1000 for _ in range(len(work))]
    loop.close()
    middle = {name: statistics.median(values) for name, values in sides.items()}
    high = {name: statistics.quantiles(values, n=20)[-1] for name, values in sides.items()}
    for name, found, peer in (("p50", middle, "bwrap"), ("p95", high, "bwrap"), ("p50", middle, "python")):
        label = f"overhead of a check, {name}, peer: {peer}"
        report.add(label, found["ours"], found[peer], unit="ms", less_is_better=True)
    best = [statistics.median(column) for column in zip(*rates, strict=True)]
    report.add("checks a second, peer: bwrap", best[0], best[1], unit="1/s")
    report.add("checks a second, peer: python", best[0], best[2], unit="1/s")
    report.add("a program that prints, p50", statistics.median(program), None, unit="ms", reason="see the checks")
    limit = [("p50 overhead against its limit", middle["ours"], GOAL_OVERHEAD, "ms", True)]
    limit += [("rate against its limit", best[0], GOAL_RATE, "1/s", False)]
    for name, value, goal, unit, less in limit:
        report.add(name, value, goal, unit=unit, goal=1.0, less_is_better=less)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
