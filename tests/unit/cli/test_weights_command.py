"""A relay refuses unusable arguments before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.cli.weights import TOKEN_VARIABLE, relay
from rillflow.errors import ConfigError, WeightsError
from rillflow.weights.transport.relay import RelayShelf


@pytest.mark.parametrize(("token", "gigabytes", "said"), [("", 1.0, TOKEN_VARIABLE), ("t", 0.0, "cannot have 0.0 GB")])
def test_what_a_relay_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, gigabytes: float, said: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match=said):
        relay("http://127.0.0.1:1", tmp_path, gigabytes=gigabytes, host="127.0.0.1", port=0)


@pytest.mark.parametrize("url", ["", "ftp://host", "host:80", "/a/folder"])
async def test_an_upstream_is_a_url(tmp_path: Path, url: str) -> None:
    with pytest.raises(WeightsError, match="not a list of URLs"):
        RelayShelf([url], "t", tmp_path)
