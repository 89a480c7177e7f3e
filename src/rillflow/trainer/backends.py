"""The trainer backends by name: each builds a `contracts.Trainer` for one policy on one rank.

To add one, write a class with the methods of the contract, or roles of your own for `build_worker`, and add its line.
`tests/unit/trainer/test_trainer_contract.py` holds every backend to the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rillflow.contracts import Trainer
from rillflow.trainer.roles import build_worker


def _accelerate(*args: Any, **options: Any) -> Trainer:
    from rillflow.trainer.accelerate_backend import AccelerateRoles

    return build_worker(*args, roles=AccelerateRoles, **options)


BACKENDS: dict[str, Callable[..., Trainer]] = {"rillflow": build_worker, "accelerate": _accelerate}
