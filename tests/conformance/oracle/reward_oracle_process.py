"""Runs in the oracles' own virtual environment: what TRL's RewardTrainer makes of the scores in one .npz, values and
gradients, into another. Nothing of Rillflow is imported here.

    python reward_oracle_process.py IN.npz OUT.npz
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

warnings.simplefilter("ignore")

from trl import RewardTrainer  # noqa: E402


def main(source: str, target: str) -> None:
    found: dict[str, np.ndarray] = {}
    with np.load(source) as arrays:
        given = {name: torch.tensor(array) for name, array in arrays.items()}
    for margin in (False, True):
        for centring in (None, 0.1):
            scores = torch.cat([given["chosen"], given["rejected"]]).requires_grad_()
            inputs: dict[str, Any] = {"margin": given["margin"]} if margin else {}
            loss = RewardTrainer.compute_loss(stub(centring), model(scores), inputs)
            name = f"{margin}/{centring or 0.0}"
            found[f"{name}/value"] = loss.detach().numpy()
            found[f"{name}/gradient"] = torch.autograd.grad(loss, scores)[0].numpy()
    np.savez(target, **found)


def model(scores: torch.Tensor) -> Any:
    return lambda **_: SimpleNamespace(logits=scores[:, None])


def stub(centring: float | None) -> Any:
    """The attributes of a trainer that `compute_loss` reads."""
    return SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=centring),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
