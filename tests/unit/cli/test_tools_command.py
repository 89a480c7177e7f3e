"""`rillflow tools`: what agents of a recipe may call."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from rillflow.cli.main import app

runner = CliRunner()


def mine(folder: Path, tools: str, name: str = "mine") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(f"extends: quickstart\nname: mine\ntools: {tools}\n")
    return str(path)


def test_tools_are_listed_with_their_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'def weigh(box: str, times: int = 1) -> float:\n    """Weigh [it].\n\n    Args:\n        box: which\n    """\n'
    )
    path = mine(tmp_path, "[calculator, mine.py:weigh]")
    result = runner.invoke(app, ["tools", path])
    assert result.exit_code == 0, result.output
    assert "calculator" in result.output
    assert "weigh  Weigh [it]." in result.output
    assert "box (string)  which" in result.output
    assert "times (integer, optional)" in result.output
    schemas = json.loads(runner.invoke(app, ["tools", path, "--json"]).output)
    assert [schema["function"]["name"] for schema in schemas] == ["calculator", "weigh"]


def test_what_is_wrong_is_said_without_a_traceback(tmp_path: Path) -> None:
    for arguments, why in (
        (["tools", "quickstart"], "names no tools"),
        (["tools", mine(tmp_path, "[calculater]")], "did you mean 'calculator'"),
        (["tools", "mcp_stdio", "--port", "8000"], "--serve http"),
        (["run", mine(tmp_path, "[{name: calculator, options: {depth: 1}}]", "other")], "its options are: none"),
    ):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 2
        assert why in result.output
        assert "Traceback" not in result.output
