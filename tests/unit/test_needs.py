"""Skipped tests are counted by missing need, with the command that provides it, and fail the run where required."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import needs

CONFTEST = """
import needs

pytest_plugins = ["needs"]
needs.NEEDS["absent"] = needs.Need(lambda: "absent is not installed", "apt-get install absent")
needs.NEEDS["gone"] = needs.Need(lambda: "gone is not installed", "make gone")
needs.NEEDS["rare"] = needs.Need(lambda: "no machine of CI has it", "buy it", ci=False)
needs.NEEDS["there"] = needs.Need(lambda: "", "nothing to do")
"""
MARKED = """
import pytest
from needs import require

@pytest.mark.needs("absent")
@pytest.mark.parametrize("n", range(3))
def test_three(n):
    raise AssertionError

@pytest.mark.needs("absent", "gone")
def test_both():
    raise AssertionError

@pytest.fixture
def server():
    require("there", "gone")

def test_by_fixture(server):
    raise AssertionError

@pytest.mark.needs("there")
def test_runs():
    pass

@pytest.mark.xfail
def test_that_is_expected_to_fail():
    raise AssertionError
"""
RARE = "import pytest\n@pytest.mark.needs('rare')\ndef test_rare(): raise AssertionError\n"
WHOLE = "from needs import require\nrequire('absent')\nimport no_such_module\n"
STRAY = "import pytest\ndef test_stray(): pytest.skip('not today')\n"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run files of tests in a pytest of their own, and return its result."""
    monkeypatch.setenv("PYTHONPATH", str(Path(needs.__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
    pytester.makeconftest(CONFTEST)

    def run(*options: str, required: bool = False, **files: str) -> pytest.RunResult:
        pytester.makepyfile(**files)
        if required:
            monkeypatch.setenv("RILLFLOW_REQUIRE_ALL", "1")
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)

    return run


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "xdist"])
def test_one_line_for_each_missing_need(run, options: tuple[str, ...]) -> None:
    result = run(*options, test_marked=MARKED, test_rare=RARE, test_whole=WHOLE)
    result.assert_outcomes(passed=1, skipped=6 + 1, xfailed=1)
    lines = [line for line in result.outlines if " skipped: " in line]
    assert lines == [
        "4 tests and 1 file skipped: absent is not installed: apt-get install absent",
        "2 tests skipped: gone is not installed: make gone",
        "1 test skipped: no machine of CI has it: buy it",
    ]
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "xdist"])
def test_a_missing_need_fails_the_run_where_all_are_required(run, options: tuple[str, ...]) -> None:
    result = run(*options, required=True, test_marked=MARKED, test_rare=RARE)
    result.stdout.fnmatch_lines(
        ["ERROR (RILLFLOW_REQUIRE_ALL=1): 4 tests skipped: absent *", "ERROR *: 2 tests skipped: gone *", "1 test *"]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_need_that_no_ci_machine_has_does_not_fail_the_run(run) -> None:
    result = run(required=True, test_rare=RARE)
    result.stdout.fnmatch_lines(["1 test skipped: no machine of CI has it: buy it"])
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize("required", [False, True])
def test_a_skip_without_a_need_is_named_and_fails_where_all_are_required(run, required: bool) -> None:
    result = run(required=required, test_stray=STRAY)
    result.stdout.fnmatch_lines(["*test_stray.py::test_stray was skipped without a need of tests/needs.py: not today"])
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if required else pytest.ExitCode.OK)


def test_an_unknown_need_is_an_error(run) -> None:
    result = run(test_typo="import pytest\n@pytest.mark.needs('ruby')\ndef test_typo(): pass\n")
    result.stdout.fnmatch_lines(["*no need 'ruby' in tests/needs.py, which has *"])
    result.assert_outcomes(errors=1)


def test_nothing_is_told_where_nothing_is_missing(run) -> None:
    result = run(test_fine="def test_fine(): pass\n")
    result.stdout.no_fnmatch_line("*could not run*")


def test_every_need_can_be_looked_for() -> None:
    for name in needs.NEEDS:
        assert isinstance(needs.why_missing(name), str), name
