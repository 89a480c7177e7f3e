"""What a relay cannot work with is said before it starts, and the token for relays is not the run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.cli.weights import TOKEN_VARIABLE, print_token, relay
from rillflow.config import load_recipe
from rillflow.errors import ConfigError, WeightsError
from rillflow.runtime.folder import RunFolder
from rillflow.weights.transport.relay import RelayShelf
from rillflow.weights.transport.serve import reading_token


@pytest.mark.parametrize(("token", "gigabytes", "said"), [("", 1.0, TOKEN_VARIABLE), ("t", 0.0, "cannot have 0.0 GB")])
def test_what_a_relay_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, gigabytes: float, said: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match=said):
        relay("http://127.0.0.1:1", tmp_path, gigabytes=gigabytes, host="127.0.0.1", port=0)


@pytest.mark.parametrize("url", ["", "ftp://host", "host:80", "/a/folder"])
async def test_an_upstream_is_a_url(tmp_path: Path, url: str) -> None:
    with pytest.raises(WeightsError, match="no list of URLs"):
        RelayShelf([url], "t", tmp_path)


def test_the_token_for_relays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(load_recipe("quickstart"), tmp_path)
    print_token(folder)
    printed = capsys.readouterr().out.strip()
    assert printed == reading_token(folder.token)
    assert folder.token not in printed
