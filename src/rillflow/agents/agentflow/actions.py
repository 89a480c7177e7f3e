"""What a planner may say: one decision, a JSON object of exactly three texts.

Invariant: `parse` accepts what `schema` describes, with any whitespace that JSON allows and nothing more; it never
raises. So a decision means the same whether an engine was held to the schema or the model wrote it freely.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rillflow.types.base import Wire

THINK, ANSWER = "think", "answer"  # the two that need no tool
LONGEST = 4000  # characters of one field; what is longer is malformed


class Decision(Wire, frozen=True):
    """One step of a planner."""

    thought: str
    action: str
    action_input: str

    def written(self) -> str:
        """As the planner is taught to write it."""
        return json.dumps(
            {"thought": self.thought, "action": self.action, "action_input": self.action_input}, ensure_ascii=False
        )


def schema(actions: Sequence[str], longest: int) -> dict[str, Any]:
    """The JSON schema of a decision for one of `actions`, with texts of at most `longest` characters.

    The bound lets a decision end before the answer is cut: what is cut is no whole JSON.
    """
    return {
        "type": "object",
        "properties": {
            "thought": {"type": "string", "maxLength": longest},
            "action": {"type": "string", "enum": list(actions)},
            "action_input": {"type": "string", "maxLength": longest},
        },
        "required": ["thought", "action", "action_input"],
        "additionalProperties": False,
    }


def parse(text: str, actions: Sequence[str] | None = None) -> Decision | None:
    """The decision, or None where the text is malformed or its action is none of `actions` (where those are known)."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.keys() != {"thought", "action", "action_input"}:
        return None
    if not all(isinstance(value, str) and len(value) <= LONGEST for value in said.values()):
        return None
    return Decision(**said) if actions is None or said["action"] in actions else None
