"""The command that runs all benches: every bench is known, failures do not stop the others, one table ends it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from bench import __main__ as front
from bench.__main__ import Outcome, Suite, end, summary_of, table_of
from bench.common import Report
from bench.registry import BENCHES, ENVIRONMENTS, ROOT, Bench, Environment, Missing

KEYS = {"bench", "machine", "versions", "command", "results"}
COLUMNS = {"name", "ours", "peer", "unit", "ratio", "goal", "met"}
WRITE = """
import json, sys
results = [{"name": "speed [a]", "ours": 2.0, "peer": 1.0, "unit": "1/s", "ratio": 2.0, "goal": 3.0, "met": False}]
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps({"bench": "x", "results": results}))
"""


class Script(Bench):
    """A bench that is a short program."""

    def command(self, name: str) -> list[str]:
        return [sys.executable, "-c", *self.arguments]


def script(text: str, **more) -> Script:
    return Script(0.1, arguments=(text,), **more)


def _suite(folder: Path, **more) -> Suite:
    return Suite(folder, Console(file=io.StringIO(), width=160), **more)


def _told(suite: Suite) -> str:
    assert isinstance(suite.console.file, io.StringIO)
    return suite.console.file.getvalue()


def _scripts() -> set[str]:
    """Return the modules that take the arguments of all benches."""
    return {path.stem for path in (ROOT / "bench").glob("*.py") if _takes_arguments(ast.parse(path.read_text()))}


def _takes_arguments(tree: ast.Module) -> bool:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "bench.common"]
    return any(name.name == "parser" for node in imports for name in node.names)


def test_every_bench_is_registered() -> None:
    assert _scripts() == set(BENCHES)


def test_every_environment_has_its_script() -> None:
    assert {bench.environment for bench in BENCHES.values()} == {"", *ENVIRONMENTS}
    assert all((ROOT / environment.command[1]).is_file() for environment in ENVIRONMENTS.values())


def test_every_bench_takes_the_shared_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, bench in BENCHES.items():
        if name == "weights_gpu" and importlib.util.find_spec("triton") is None:
            continue  # its kernels cannot be imported without Triton
        module = importlib.import_module(f"bench.{name}")
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == 0
        usage = capsys.readouterr().out
        for word in ("--quick", "--json FILE", *(word for word in bench.arguments if word.startswith("--"))):
            assert word in usage, name


def test_a_report_has_the_keys_of_all_benches(tmp_path: Path) -> None:
    report = Report("x")
    report.add("speed", 2.0, 1.0, unit="1/s", goal=3.0)
    report.finish(str(tmp_path / "x.json"), costs={"a": 1})
    written = json.loads((tmp_path / "x.json").read_text())
    assert set(written) == KEYS | {"costs"}
    assert set(written["results"][0]) == COLUMNS


def test_a_failed_bench_is_told_with_its_last_lines_and_the_others_run(tmp_path: Path) -> None:
    suite = _suite(tmp_path)
    benches = {
        "broken": script("print('before the end'); raise SystemExit(3)"),
        "silent": script("pass"),
        "good": script(WRITE),
    }
    outcomes = suite.run_all(benches, {})
    assert [(one.bench, one.status) for one in outcomes] == [
        ("broken", "failed"),
        ("silent", "failed"),
        ("good", "ran"),
    ]
    assert outcomes[0].reason == "exit code 3"
    assert "wrote no result" in outcomes[1].reason
    told = _told(suite)
    assert "  | before the end" in told
    assert "good: 1 results in" in told


def test_a_bench_past_its_deadline_has_failed(tmp_path: Path) -> None:
    suite = _suite(tmp_path, deadline=0.01)
    (outcome,) = suite.run_all({"slow": script("import time; time.sleep(600)")}, {})
    assert (outcome.status, outcome.reason) == ("failed", "not finished within 0.01 minutes")


def test_a_bench_ends_with_all_its_processes() -> None:
    own_session = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", own_session], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        end(process)
    assert child.wait(60) is None  # not our child: its exit code is unknown


def test_a_bench_that_cannot_run_here_is_skipped_with_the_remedy(tmp_path: Path) -> None:
    never = script("raise SystemExit(9)", needs=(lambda: None, lambda: Missing("no wings", "apt-get install wings")))
    outcomes = _suite(tmp_path).run_all({"flight": never}, {})
    assert outcomes == [Outcome("flight", "skipped", reason="no wings (to provide it: apt-get install wings)")]


def test_a_missing_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    (tmp_path / "make.sh").write_text(f"echo made >> {made}\n")
    monkeypatch.setattr(Environment, "ready", lambda _: made.exists())
    environments = {"peer": Environment(".venv-none", "peer", ("bash", str(tmp_path / "make.sh")))}
    benches = {name: script(WRITE, environment="peer") for name in ("one", "two")}
    assert [one.status for one in _suite(tmp_path).run_all(benches, environments)] == ["ran", "ran"]
    assert made.read_text() == "made\n"


def test_an_environment_that_cannot_be_made_fails_its_benches_only(tmp_path: Path) -> None:
    (tmp_path / "make.sh").write_text("echo no such package; exit 1\n")
    environments = {"peer": Environment(".venv-none", "peer", ("bash", str(tmp_path / "make.sh")))}
    suite = _suite(tmp_path)
    outcomes = suite.run_all({"one": script(WRITE, environment="peer"), "two": script(WRITE)}, environments)
    assert [one.status for one in outcomes] == ["failed", "ran"]
    assert outcomes[0].reason.endswith("make.sh failed: exit code 1")
    assert "no such package" in _told(suite)


def test_an_environment_is_ready_when_it_holds_its_package(tmp_path: Path) -> None:
    folder = Path(sys.prefix)
    assert Environment(str(folder), "rich", ()).ready()
    assert not Environment(str(folder), "no-such-package", ()).ready()
    assert not Environment(str(tmp_path / "none"), "rich", ()).ready()


def test_one_table_has_every_result(tmp_path: Path) -> None:
    suite = _suite(tmp_path)
    outcomes = suite.run_all({"good": script(WRITE), "flight": script("", needs=(lambda: Missing("x", "y"),))}, {})
    suite.console.print(table_of(outcomes))
    told = _told(suite)
    for word in ("bench", "seconds", "ratio", "goal", "met", "speed [a]", "2.00", "3.00", "NO", "skipped: x"):
        assert word in told
    assert summary_of(outcomes, 90.0) == "1 benches ran; 1 skipped (flight); 0 of 1 goals met; 1.5 minutes"


@pytest.mark.parametrize(("text", "code"), [(WRITE, 0), ("raise SystemExit(1)", 1)])
def test_the_command_fails_only_if_a_bench_fails(
    text: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(front, "BENCHES", {"x": script(text)})
    monkeypatch.setattr(front.signal, "signal", lambda *_: None)
    assert front.main(["--quick", "--json", str(tmp_path / "all.json")]) == code
    written = json.loads((tmp_path / "all.json").read_text())
    assert set(written) == {"machine", "versions", "command", "benches"}
    assert [one["status"] for one in written["benches"]] == ["failed" if code else "ran"]


def test_an_unknown_bench_is_refused_with_the_nearest_name() -> None:
    command = [sys.executable, "-m", "bench", "wyre"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert "there is no bench 'wyre'; did you mean 'wire'?" in done.stderr
