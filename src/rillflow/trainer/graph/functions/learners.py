"""Which model a train node trains."""

from __future__ import annotations

from rillflow.errors import GraphError
from rillflow.trainer.graph.step import Step
from rillflow.trainer.learner import Learner


def learner_of(step: Step, role: str) -> Learner:
    found = step.models.get(role)
    if not isinstance(found, Learner) or found.optimizer is None:
        raise GraphError(f"there is no {role} that can be trained", "only an actor, a critic or a reward model is")
    return found
