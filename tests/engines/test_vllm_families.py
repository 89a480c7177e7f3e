"""Families of models on a real vLLM: docs/models.md tells what comes of each (`python tests/models_page.py --vllm`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_families import FAMILIES
from models_page import VLLM, told
from soak import repetitions
from vllm_families import serve

pytestmark = [pytest.mark.engines, pytest.mark.soak, pytest.mark.timeout(900)]


# The short form: windows, names that are not those of a checkpoint, and weights that cannot be changed in place.
@pytest.mark.parametrize("family", repetitions(["Gemma 3", "Mixtral", "Mamba 2"], list(FAMILIES)))
async def test_the_page_tells_what_vllm_does(family: str, tmp_path: Path, vllm_python: str) -> None:
    assert await serve(family, tmp_path, vllm_python) == told()[family][VLLM]
