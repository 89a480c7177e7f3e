"""Run benches one after the other and end with one table of all results.

Every bench is a process with a deadline. A bench that fails or passes its deadline is reported with its last lines, and
the next one runs. A bench whose conditions this machine does not meet is skipped with the reason. Environments of peers
that are missing are made first. The exit code is 1 if a bench failed to run; a missed goal is a result, not a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.common import add_columns, cells, machine, versions, write_json
from bench.registry import BENCHES, ENVIRONMENTS, ROOT, Bench, Environment
from rillflow.errors import did_you_mean

LEAST_DEADLINE, WHOLE_DEADLINE, ENVIRONMENT_DEADLINE = 20.0, 240.0, 60.0  # minutes
PATIENCE = 10  # times a bench's usual minutes
GRACE = 20.0  # seconds between SIGTERM and SIGKILL
HEARTBEAT = 60.0  # seconds between two lines of progress without a terminal
LAST_LINES = 25
WIDTH = 160  # of the table without a terminal


@dataclass
class Outcome:
    """What became of one bench. `reason` says why it was skipped or how it failed."""

    bench: str
    status: str = "ran"  # or "skipped" or "failed"
    seconds: float = 0.0
    reason: str = ""
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """Runs benches; `folder` receives the log and the result of each."""

    folder: Path
    console: Console
    quick: bool = False
    deadline: float | None = None  # minutes of one bench; None: by its usual minutes

    def run_all(self, benches: Mapping[str, Bench], environments: Mapping[str, Environment]) -> list[Outcome]:
        """Make the environments that are missing, then run every bench that this machine can run."""
        missing = {name: found for name, bench in benches.items() if (found := bench.missing())}
        wanted = {bench.environment for name, bench in benches.items() if name not in missing and bench.environment}
        unmade = {name: self.make(environments[name]) for name in sorted(wanted)}
        outcomes = []
        for number, (name, bench) in enumerate(benches.items(), start=1):
            if found := missing.get(name):
                self._tell(f"{name} skipped: {found.reason}")
                outcomes.append(Outcome(name, "skipped", reason=f"{found.reason} (to provide it: {found.command})"))
            elif reason := unmade.get(bench.environment):
                outcomes.append(Outcome(name, "failed", reason=reason))
            else:
                outcomes.append(self.measure(name, bench, f"{name} ({number} of {len(benches)})"))
        return outcomes

    def make(self, environment: Environment) -> str:
        """Run the environment's command unless its package is installed. Return how it failed, or an empty string."""
        if environment.ready():
            return ""
        label, log = f"making {environment.folder}", self.folder / f"{environment.folder}.log"
        command = " ".join(environment.command)
        self._tell(f"{label} with `{command}`")
        started = time.monotonic()
        failure = self._run(list(environment.command), log, ENVIRONMENT_DEADLINE, label)
        if not failure and not environment.ready():
            failure = f"{environment.package} is not installed in {environment.folder}"
        if failure:
            self._tell_failure(f"{command} failed: {failure}", log)
            return f"{command} failed: {failure}"
        self._tell(f"made {environment.folder} in {time.monotonic() - started:.0f} s")
        return ""

    def measure(self, name: str, bench: Bench, label: str) -> Outcome:
        """Run one bench and read the object that it wrote."""
        log, written = self.folder / f"{name}.log", self.folder / f"{name}.json"
        self._tell(label + (f", about {bench.minutes:g} min" if self.quick else ""))
        started = time.monotonic()
        command = [*bench.command(name), *(["--quick"] if self.quick else []), "--json", str(written)]
        failure = self._run(command, log, self._minutes(bench), label)
        outcome = Outcome(name, seconds=time.monotonic() - started)
        if not failure:
            try:
                outcome.report = read_report(written)
                self._tell(f"{name}: {len(outcome.report['results'])} results in {outcome.seconds:.0f} s")
                return outcome
            except (OSError, ValueError) as error:
                failure = f"it wrote no result: {error}"
        outcome.status, outcome.reason = "failed", failure
        self._tell_failure(f"{name} failed after {outcome.seconds:.0f} s: {failure}", log)
        return outcome

    def _minutes(self, bench: Bench) -> float:
        """Return the minutes after which a bench is ended."""
        if self.deadline is not None:
            return self.deadline
        return max(LEAST_DEADLINE, PATIENCE * bench.minutes) if self.quick else WHOLE_DEADLINE

    def _run(self, command: Sequence[str], log: Path, minutes: float, label: str) -> str:
        """Run a command with its output in `log`. Return how it failed, or an empty string."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, start_new_session=True
            )
            try:
                finished = self._watch(process, minutes, label)
            finally:
                end(process)
        if not finished:
            return f"not finished within {minutes:g} minutes"
        return f"exit code {process.returncode}" if process.returncode else ""

    def _watch(self, process: subprocess.Popen[bytes], minutes: float, label: str) -> bool:
        """Show the time so far until the process ends. Return False if the deadline comes first."""
        started = shown = now = time.monotonic()
        deadline = started + 60 * minutes
        with self.console.status(label) as status:
            while now < deadline:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(1.0, deadline - now))
                    return True
                now = time.monotonic()
                progress = f"{label}: {now - started:.0f} s so far"
                status.update(progress)
                if not self.console.is_terminal and now - shown >= HEARTBEAT:
                    shown = now
                    self._tell(progress)
        return False

    def _tell(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False)

    def _tell_failure(self, what: str, log: Path) -> None:
        self.console.print(what, style="red", markup=False, highlight=False)
        for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:]:
            self._tell(f"  | {line}")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, its descendants (also those in sessions of their own) and what is left of its session."""
    if process.poll() is None:
        leader = psutil.Process(process.pid)
        family = [leader, *leader.children(recursive=True)]
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.terminate()
        for one in psutil.wait_procs(family, timeout=GRACE)[1]:
            one.kill()
        process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_report(path: Path) -> dict[str, Any]:
    """Return the object that a bench wrote; ValueError where it has no results."""
    report = json.loads(path.read_text())
    if not isinstance(report, dict) or not isinstance(report.get("results"), list):
        raise ValueError("the object has no list of results")
    return report


# ---------------------------------------------------------------- the results


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Return all results in one table, with a section for each bench."""
    table = Table(title="all benches")
    table.add_column("bench", no_wrap=True)
    table.add_column("seconds", justify="right")
    add_columns(table)
    for outcome in outcomes:
        taken = f"{outcome.seconds:.0f}" if outcome.seconds else "-"
        rows = [cells(row) for row in outcome.report.get("results", [])]
        if outcome.status != "ran":
            rows = [[escape(f"{outcome.status}: {outcome.reason}")]]
        for place, row in enumerate(rows):
            first = (outcome.bench, taken) if place == 0 else ("", "")
            table.add_row(*first, *row, end_section=place == len(rows) - 1)
    return table


def summary_of(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return how many benches ran and how many goals were met, in one line."""
    by_status = {status: [one.bench for one in outcomes if one.status == status] for status in ("skipped", "failed")}
    told = [f"{sum(one.status == 'ran' for one in outcomes)} benches ran"]
    told += [f"{len(names)} {status} ({', '.join(names)})" for status, names in by_status.items() if names]
    judged = [row["met"] for one in outcomes for row in one.report.get("results", []) if row["met"] is not None]
    return f"{'; '.join(told)}; {sum(judged)} of {len(judged)} goals met; {seconds / 60:.1f} minutes"


def write(outcomes: Sequence[Outcome], destination: str) -> None:
    """Write all outcomes, with the whole object of each bench, as one JSON object."""
    command = shlex.join(["python", "-m", "bench", *sys.argv[1:]])
    benches = [vars(outcome) for outcome in outcomes]
    whole = {"machine": machine(), "versions": versions(), "command": command, "benches": benches}
    write_json(whole, destination)


# ---------------------------------------------------------------- the command


def parser() -> argparse.ArgumentParser:
    known = "\n".join(f"  {name:16s} {bench.minutes:4g}" for name, bench in BENCHES.items())
    total = sum(bench.minutes for bench in BENCHES.values() if not bench.needs_gpu)
    made = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog=f"Benches, with their usual minutes on two cores with --quick:\n{known}\n\n"
        f"Those that need no GPU take about {total:.0f} minutes together. The first run also makes the\n"
        "environments of the peers, which takes several gigabytes and five to ten minutes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("names", nargs="*", metavar="NAME", help="benches to run; default: all")
    made.add_argument("--quick", action="store_true", help="fewer repeats")
    made.add_argument("--json", metavar="FILE", help="write all results to FILE, or to stdout when it is -")
    limits = f"{PATIENCE} times the usual minutes, at least {LEAST_DEADLINE:g}; {WHOLE_DEADLINE:g} without --quick"
    made.add_argument("--deadline", type=float, metavar="MINUTES", help=f"limit of each bench; default: {limits}")
    return made


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser()
    given = made.parse_args(arguments)
    for name in given.names:
        if name not in BENCHES:
            made.error(f"there is no bench {name!r}; {did_you_mean(name, BENCHES)}known: {', '.join(BENCHES)}")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = read_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no bench is left running
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=WIDTH)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="rillflow-bench-"))
    benches = {name: bench for name, bench in BENCHES.items() if name in (given.names or BENCHES)}
    outcomes = Suite(folder, console, given.quick, given.deadline).run_all(benches, ENVIRONMENTS)
    console.print(table_of(outcomes))
    console.print(summary_of(outcomes, time.monotonic() - started), highlight=False)
    if given.json is not None:
        write(outcomes, given.json)
    if any(outcome.status == "failed" for outcome in outcomes):
        console.print(f"logs: {folder}", highlight=False)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
