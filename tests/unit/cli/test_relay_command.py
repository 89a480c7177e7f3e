"""`rillflow relay` refuses what it cannot work with, and says what to do."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rillflow.cli.parts import TOKEN_VARIABLE, run_relay
from rillflow.errors import ConfigError, WeightsError
from rillflow.weights.transport.relay import RelayShelf


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
