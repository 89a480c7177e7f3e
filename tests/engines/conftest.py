"""A real vLLM, in an environment of its own: made by `scripts/make_vllm_venv.sh`, or named by VLLM_PYTHON."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from needs import VLLM_PYTHON, require
from rillflow.weights.model_folder import model_folder

pytest.register_assert_rewrite("contract", "contract_logprobs", "contract_world")


@pytest.fixture(scope="session")
def vllm_python() -> Iterator[str]:
    require("vllm")
    with pytest.MonkeyPatch.context() as monkeypatch:
        # The worker runs in the process of the engine's core, as on one GPU: each process takes long to import vLLM.
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield str(VLLM_PYTHON)


def build_model(folder: Path, *, tied: bool, seed: int) -> Any:
    """The shipped model's shape with random weights, large enough that every token matters. Its folder recommends
    sampling that no request asks for."""
    config = AutoConfig.from_pretrained(model_folder("tiny"))
    config.tie_word_embeddings = tied
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.generation_config.update(do_sample=True, temperature=0.3, top_k=3, top_p=0.5, repetition_penalty=1.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(autouse=True)
def _nothing_left_in_memory() -> Iterator[None]:
    yield
    assert not list(Path("/dev/shm").glob(f"rillflow-{os.getpid()}-*"))
