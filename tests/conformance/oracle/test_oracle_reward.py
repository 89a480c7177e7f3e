"""The loss of pairs, and its slopes, are those of TRL's RewardTrainer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rillflow.trainer.supervised.functions import pair_losses, pair_slopes

pytestmark = [pytest.mark.needs("oracle"), pytest.mark.oracle]

HERE = Path(__file__).resolve().parent
VENV = HERE.parents[2] / ".venv-oracle"
PAIRS = 64


@pytest.fixture(scope="module")
def scores() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    chosen, rejected = 4 * rng.normal(size=(2, PAIRS))
    return {"chosen": chosen, "rejected": rejected, "margin": rng.random(PAIRS)}


@pytest.fixture(scope="module")
def trl(scores: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Its values and gradients, by `MARGIN/CENTRING/value` and `…/gradient`."""
    folder = tmp_path_factory.mktemp("reward_oracle")
    np.savez(folder / "in.npz", **scores)
    files = (str(folder / "in.npz"), str(folder / "out.npz"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    asked = subprocess.run(
        [str(VENV / "bin" / "python"), str(HERE / "reward_oracle_process.py"), *files],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert asked.returncode == 0, asked.stderr[-4000:]
    with np.load(folder / "out.npz") as found:
        return dict(found)


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("centring", [0.0, 0.1])
def test_pairs_are_trls(
    margin: bool, centring: float, scores: dict[str, np.ndarray], trl: dict[str, np.ndarray]
) -> None:
    wanted = scores["margin"] if margin else np.zeros(PAIRS)
    given = (scores["chosen"], scores["rejected"], wanted, centring)
    name = f"{margin}/{centring}"
    np.testing.assert_allclose(pair_losses(*given).mean(), trl[f"{name}/value"], rtol=1e-9)
    slopes = np.concatenate(pair_slopes(*given)) / PAIRS
    np.testing.assert_allclose(slopes, trl[f"{name}/gradient"], rtol=1e-9, atol=1e-15)
