"""The text that a process reward model reads. There is no other place that builds it: labels, training and rewards
all come here, so they can never drift apart.

A row is the question and the decisions so far, in the shape of `rillflow fit`'s task process_reward. It never holds
what a tool said: the model rates the decision, which is what is trained, and not the world's answer to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rillflow.agents.agentflow.actions import Decision


def prm_row(
    question: str, decisions: Sequence[Decision], labels: Sequence[float | None] | None = None
) -> dict[str, Any]:
    """One row for one episode; each decision is scored behind all those before it."""
    steps: list[dict[str, Any]] = [{"text": prm_step(decision)} for decision in decisions]
    if labels is not None:
        for step, label in zip(steps, labels, strict=True):
            step["label"] = label
    return {"prompt": f"{question.strip()}\n", "steps": steps}


def prm_step(decision: Decision) -> str:
    """A line of its own: the model is asked at its end."""
    parts = (decision.thought, decision.action, decision.action_input)
    thought, action, action_input = (" ".join(part.split()) for part in parts)
    return f"{thought} > {action}: {action_input}"
