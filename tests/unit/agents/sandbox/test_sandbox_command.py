from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rillflow.cli.main import app


@pytest.mark.needs("bubblewrap")
def test_the_command_tries_every_promise_and_says_what_holds() -> None:
    done = CliRunner().invoke(app, ["sandbox"])
    assert done.exit_code == 0, done.output
    assert "isolation: bubblewrap. Everything holds." in done.output


def test_the_weaker_isolation_is_not_called_safe() -> None:
    done = CliRunner().invoke(app, ["sandbox", "--isolation", "process"])
    assert done.exit_code == 0, done.output
    assert "does not hold hostile code" in done.output
    assert "Everything holds" not in done.output
