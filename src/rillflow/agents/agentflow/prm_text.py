"""The text that a process reward model reads. Labels, training and rewards all build it here, so they cannot differ.

A row is one state and one decision, in the shape of `rillflow fit`'s task process_reward. The state is the prompt that
the planner was asked with: it holds the question and every earlier decision with its result. The decision's own result
is left out: the model rates the decision, which is what is trained, not the world's answer to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rillflow.agents.agentflow.actions import Decision


def prm_row(state: str, decision: Decision, label: float | None = None) -> dict[str, Any]:
    """Return the row of one decision, as the conversation in which the planner took it."""
    step: dict[str, Any] = {"messages": [{"role": "assistant", "content": decision.written()}]}
    if label is not None:
        step["label"] = label
    return {"messages": [{"role": "user", "content": state}], "steps": [step]}


def without_results(question: str, earlier: Sequence[Decision]) -> str:
    """Return a state that lacks the results of earlier decisions, to measure what they are worth."""
    done = [f"{decision.action} {decision.action_input}" for decision in earlier]
    return "\n".join([question.strip(), *done])
