"""The families of models against the parts of the product, as docs/models.md tells (`python tests/models_page.py`).
`tests/engines/test_vllm_families.py` has vLLM's column."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from commands import Warm
from model_families import FAMILIES, PARTS
from models_page import FSDP, sharded, told


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_tells_what_each_part_does(family: str) -> None:
    assert {part: told()[family][part].word for part in PARTS} == {
        part: run(family).word for part, run in PARTS.items()
    }


def test_the_page_has_every_family() -> None:
    assert list(told()) == list(FAMILIES)


@pytest.mark.slow
def test_the_page_tells_what_sharding_does(warm: Warm, tmp_path: Path) -> None:
    assert {family: row[FSDP].word for family, row in told().items()} == {
        family: outcome.word for family, outcome in sharded(tmp_path, warm).items()
    }
