"""`rillflow token` prints the token of a scope and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rillflow.cli.main import app
from rillflow.config import load_recipe
from rillflow.runtime.folder import RunFolder
from rillflow.types import TokenScope
from rillflow.wire.tokens import SCOPES, scoped_token


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
