"""Which GPUs a server sees."""

from __future__ import annotations

import pytest
import torch

from rillflow.engine.servers.process import visible_gpus
from rillflow.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda:1", None, "1,2"),
        ("cuda:1", "4,5,7", "5,7"),
        ("cuda:0", "GPU-aa,GPU-bb", "GPU-aa,GPU-bb"),
        ("cpu", "4,5", "-1"),
    ],
)
def test_a_number_counts_among_those_that_we_see(
    device: str, visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus(torch.device(device), 2) == {"CUDA_VISIBLE_DEVICES": expected}


def test_without_a_number_it_sees_what_we_see() -> None:
    assert visible_gpus(torch.device("cuda"), 2) == {}


def test_more_than_we_see_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        visible_gpus(torch.device("cuda:1"), 2)
