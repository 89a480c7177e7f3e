"""The oracles are asked once for all tests, in one process of their own environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from oracle_batches import SEEDS, random_batch

from needs import require

HERE = Path(__file__).resolve().parent
VENV = HERE.parents[2] / ".venv-oracle"


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Their values and gradients, by `SEED/NAME/value` and `SEED/NAME/gradient`."""
    require("oracle")
    folder = tmp_path_factory.mktemp("oracle")
    batches = {f"{seed}/{name}": array for seed in SEEDS for name, array in random_batch(seed).arrays.items()}
    np.savez(folder / "in.npz", **batches)
    command = [
        str(VENV / "bin" / "python"),
        str(HERE / "oracle_process.py"),
        str(folder / "in.npz"),
        str(folder / "out.npz"),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    asked = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert asked.returncode == 0, asked.stderr[-4000:]
    with np.load(folder / "out.npz") as found:
        return dict(found)
