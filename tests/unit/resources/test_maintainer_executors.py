"""Nodes as real processes and by commands: found again by the next executor, ended without harm to others."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from rillflow.config.runs import ScalingConfig
from rillflow.errors import RunError
from rillflow.resources.executors import CommandExecutor, Kept, KeptNodes, LocalExecutor, filled

NOBODY = "http://127.0.0.1:9"  # no service answers here; a node waits for one longer than a test takes


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for process in psutil.process_iter(["cmdline"]):
        if any(str(tmp_path) in word for word in process.info["cmdline"] or []):
            process.kill()


def local(root: Path) -> LocalExecutor:
    return LocalExecutor(root, NOBODY, {**os.environ, "RILLFLOW_TOKEN": "secret"}, grace=2.0)


def pid_of(root: Path, node: str) -> int:
    pid = KeptNodes(root / "maintainer-nodes.json").all()[node].pid
    assert pid is not None
    return pid


async def test_a_local_node_outlives_who_started_it_and_is_found_by_the_next(root: Path) -> None:
    first = local(root)
    await first.start("auto-0")
    await first.close()
    pid = pid_of(root, "auto-0")
    assert os.getsid(pid) == pid, "a session of its own: a closed terminal does not end it"
    assert "secret" not in " ".join(psutil.Process(pid).cmdline())
    second = local(root)
    assert await second.nodes() == {"auto-0": True}
    await second.stop("auto-0")
    assert await second.nodes() == {}
    assert not psutil.pid_exists(pid)
    assert not (root / "maintainer-nodes.json").exists()
    assert (root / "logs" / "auto-0.log").exists()


async def test_a_start_that_was_cut_short_is_found_by_its_words(root: Path) -> None:
    executor = local(root)
    await executor.start("auto-0")
    pid = pid_of(root, "auto-0")
    KeptNodes(root / "maintainer-nodes.json").keep("auto-0", Kept())
    following = local(root)
    assert await following.nodes() == {"auto-0": True}
    await following.stop("auto-0")
    assert await executor.nodes() == {}
    assert not psutil.pid_exists(pid)


async def test_a_start_that_never_came_to_a_process_does_not_run(root: Path) -> None:
    KeptNodes(root / "maintainer-nodes.json").keep("auto-0", Kept())
    executor = local(root)
    assert await executor.nodes() == {"auto-0": False}
    await executor.stop("auto-0")
    assert await executor.nodes() == {}


@pytest.fixture
def stranger() -> Iterator[psutil.Popen]:
    process = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("began", [0.0, None], ids=["another time", "the same time"])
async def test_a_strangers_process_with_the_same_number_is_left_alone(
    root: Path, stranger: psutil.Popen, began: float | None
) -> None:
    started = stranger.create_time() if began is None else began
    KeptNodes(root / "maintainer-nodes.json").keep("auto-0", Kept(stranger.pid, started))
    executor = local(root)
    assert await executor.nodes() == {"auto-0": False}
    await executor.stop("auto-0")
    assert stranger.poll() is None


async def test_a_stopped_process_is_ended_all_the_same(root: Path) -> None:
    executor = local(root)
    executor._grace = 0.3
    await executor.start("auto-0")
    os.kill(pid_of(root, "auto-0"), signal.SIGSTOP)
    await executor.stop("auto-0")
    assert await executor.nodes() == {}


async def test_a_name_is_used_once(root: Path) -> None:
    executor = local(root)
    await executor.start("auto-0")
    with pytest.raises(RunError, match="started before"):
        await executor.start("auto-0")
    await executor.stop("auto-0")
    await executor.stop("auto-0")


# ---------------------------------------------------------------- commands

SCHEDULER = """#!/bin/sh
# Stands for sbatch, scancel and squeue: jobs are files with the number of their process.
jobs=$1; verb=$2; job=$3
case $verb in
  submit)
    shift 3
    setsid sleep 600 >/dev/null 2>&1 &
    echo $! > "$jobs/$job"; echo "Submitted $job: $*" > "$jobs/log" ;;
  cancel) kill "$(cat "$jobs/$job")"; rm "$jobs/$job" ;;
  state) kill -0 "$(cat "$jobs/$job")" 2>/dev/null ;;
esac
"""


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[str]:
    """The command of a scheduler, up to its verb."""
    jobs = tmp_path / "my jobs"
    jobs.mkdir()
    script = tmp_path / "scheduler"
    script.write_text(SCHEDULER)
    script.chmod(0o700)
    yield f"{script} '{jobs}'"
    for job in jobs.glob("auto-*"):
        with suppress(ProcessLookupError):
            os.kill(int(job.read_text()), signal.SIGKILL)


def by_command(root: Path, scheduler: str, *, alive: bool = True, deadline: float = 60.0) -> CommandExecutor:
    return CommandExecutor(
        root,
        start=f"{scheduler} submit {{node}} rollout --join {{url}} --name {{node}} --token-file {{token_file}}",
        stop=f"{scheduler} cancel {{node}}",
        alive=f"{scheduler} state {{node}}" if alive else None,
        url="http://head:8000",
        token_file=root / "my token",
        deadline=deadline,
    )


async def test_nodes_of_a_scheduler_are_started_found_and_ended(root: Path, scheduler: str) -> None:
    await by_command(root, scheduler).start("auto-0")
    said = (root / "my jobs" / "log").read_text()
    words = f"rollout --join http://head:8000 --name auto-0 --token-file {root}/my token"
    assert said == f"Submitted auto-0: {words}\n"
    following = by_command(root, scheduler)
    assert await following.nodes() == {"auto-0": True}
    await following.stop("auto-0")
    assert await following.nodes() == {}
    await following.stop("auto-0")


async def test_a_job_that_has_died_does_not_run_and_is_passed_over(root: Path, scheduler: str) -> None:
    executor = by_command(root, scheduler)
    await executor.start("auto-0")
    os.kill(int((root / "my jobs" / "auto-0").read_text()), signal.SIGKILL)
    await wait_for_death(executor)
    await executor.stop("auto-0")
    assert await executor.nodes() == {}


async def wait_for_death(executor: CommandExecutor) -> None:
    deadline = time.monotonic() + 60
    while (await executor.nodes())["auto-0"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_without_a_command_for_it_a_node_counts_as_running_until_it_is_stopped(
    root: Path, scheduler: str
) -> None:
    executor = by_command(root, scheduler, alive=False)
    await executor.start("auto-0")
    assert await executor.nodes() == {"auto-0": True}
    await executor.stop("auto-0")
    assert await executor.nodes() == {}


async def test_a_command_that_fails_says_so_and_the_node_stays_known(root: Path) -> None:
    executor = CommandExecutor(
        root, start="echo no room >&2; exit 7", stop="exit 1", alive=None, url="u", token_file=root, deadline=60.0
    )
    with pytest.raises(RunError, match="code 7: no room"):
        await executor.start("auto-0")
    with pytest.raises(RunError, match=r"resources\.scaling\.stop"):
        await executor.stop("auto-0")
    assert await executor.nodes() == {"auto-0": True}


async def test_a_command_that_hangs_is_ended_with_all_that_it_started(root: Path) -> None:
    start = f"sleep 600 & echo $! > '{root}/child'; wait"
    executor = CommandExecutor(root, start=start, stop="true", alive=None, url="u", token_file=root, deadline=1.0)
    with pytest.raises(RunError, match="still running"):
        await executor.start("auto-0")
    child = int((root / "child").read_text())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_values_are_words_of_the_shell_and_other_braces_stay() -> None:
    template = "squeue --name={node} | awk '{print $1}' ${HOME} {other}"
    assert filled(template, {"node": "a; rm -rf /"}) == (
        "squeue --name='a; rm -rf /' | awk '{print $1}' ${HOME} {other}"
    )


# ---------------------------------------------------------------- the page's examples

PAGE = Path(__file__).resolve().parents[3] / "docs" / "maintainer.md"
FAKES = {
    "sbatch": """while [ $# -gt 0 ]; do
      case $1 in --job-name) name=$2; shift;; --wrap) wrap=$2; shift;; esac; shift
    done; echo "$wrap" > "$JOBS/$name" """,
    "scancel": 'rm -f "$JOBS/$2"',
    "squeue": 'if [ -e "$JOBS/$3" ]; then echo "1 $3"; fi',
    "kubectl": """case $1 in
      apply) cat > "$JOBS/new"; mv "$JOBS/new" "$JOBS/$(sed -n 's/^name: //p' "$JOBS/new")";;
      delete) rm -f "$JOBS/$3";;
      get) if [ -e "$JOBS/$3" ]; then printf Running; fi;;
    esac""",
}


def examples() -> dict[str, ScalingConfig]:
    """The recipes of the page that start nodes by commands, by what stands before them."""
    found = re.findall(r"^(\w+):\n\n```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return {name: ScalingConfig(**yaml.safe_load(text)["resources"]["scaling"]) for name, text in found}


@pytest.mark.parametrize("name", ["Slurm", "Kubernetes"])
async def test_the_pages_examples_start_find_and_end_nodes(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, programs, pod = root / "jobs", root / "bin", root / "node.yaml"
    jobs.mkdir()
    programs.mkdir()
    for program, text in FAKES.items():
        (programs / program).write_text(f"#!/bin/sh\n{text}\n")
        (programs / program).chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("JOBS", str(jobs))
    pod.write_text("name: NODE\ncommand: rillflow rollout --join URL --name NODE\n")
    scaling = examples()[name]
    assert scaling.start is not None
    assert scaling.stop is not None
    executor = CommandExecutor(
        root,
        start=scaling.start.replace("/etc/rillflow/node.yaml", str(pod)),
        stop=scaling.stop,
        alive=scaling.alive,
        url="http://head:8000",
        token_file=root / "my token",
    )
    await executor.start("auto-0")
    await executor.start("auto-1")
    assert "rillflow rollout --join http://head:8000 --name auto-0" in (jobs / "auto-0").read_text()
    (jobs / "auto-1").unlink()
    assert await executor.nodes() == {"auto-0": True, "auto-1": False}
    await executor.stop("auto-0")
    await executor.stop("auto-1")
    assert await executor.nodes() == {}
    assert list(jobs.iterdir()) == []
