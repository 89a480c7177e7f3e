"""`rillflow maintain`, `relay` and `token`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rillflow.cli.main import app
from rillflow.cli.parts import TOKEN_VARIABLE, run_relay
from rillflow.config import load_recipe
from rillflow.errors import ConfigError, WeightsError
from rillflow.runtime.folder import RunFolder
from rillflow.types import TokenScope
from rillflow.weights.transport.relay import RelayShelf
from rillflow.wire.tokens import SCOPES, scoped_token


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


@pytest.mark.parametrize("gigabytes", [0.0, -1.0, 1e-9, math.nan, math.inf])
def test_a_limit_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: float) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "some token")
    with pytest.raises(ConfigError, match="GB") as refused:
        run_relay("http://127.0.0.1:1", tmp_path, gigabytes=gigabytes, host="127.0.0.1", port=0)
    assert "--limit" in refused.value.hint


def test_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE) as refused:
        run_relay("http://127.0.0.1:1", tmp_path, gigabytes=1.0, host="127.0.0.1", port=0)
    assert "rillflow token RUN reader" in refused.value.hint


@pytest.mark.parametrize("url", ["", "ftp://host", "host:80", "/a/folder"])
async def test_an_upstream_is_a_url(tmp_path: Path, url: str) -> None:
    with pytest.raises(WeightsError, match="not a list of URLs"):
        RelayShelf([url], "t", tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(load_recipe("quickstart"), tmp_path)


@pytest.mark.parametrize("scope", SCOPES)
def test_each_scope_has_its_token(folder: RunFolder, scope: TokenScope) -> None:
    done = CliRunner().invoke(app, ["token", str(folder.root), scope])
    assert (done.exit_code, done.output) == (0, f"{scoped_token(folder.token, scope)}\n")


def test_without_a_scope_it_is_the_nodes(folder: RunFolder) -> None:
    done = CliRunner().invoke(app, ["token", str(folder.root)])
    assert done.output == f"{folder.token_of('node')}\n"
    assert folder.token not in done.output


def test_an_unknown_scope_is_refused(folder: RunFolder) -> None:
    assert CliRunner().invoke(app, ["token", str(folder.root), "admin"]).exit_code != 0
