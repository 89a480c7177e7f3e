"""`rillflow maintain`: its required arguments, and its errors if one is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rillflow.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a run folder, or --join URL"),
        (["RUN", "--join", "http://127.0.0.1:9"], "give a run folder, or --join URL"),
        (["RUN"], "is not a run folder"),
        (["RUN", "--port", "0"], "give --mcp with it"),
        (["--join", "http://127.0.0.1:9"], "--state DIR"),
        (["--join", "http://127.0.0.1:9", "--state", "STATE"], "RILLFLOW_TOKEN"),
    ],
)
def test_what_is_missing_is_said(arguments: list[str], said: str, tmp_path: Path) -> None:
    words = [str(tmp_path / word) if word in ("RUN", "STATE") else word for word in arguments]
    result = CliRunner().invoke(app, ["maintain", *words], env={"COLUMNS": "200"})
    assert result.exit_code != 0
    assert said in result.output.replace("\n", " ")
