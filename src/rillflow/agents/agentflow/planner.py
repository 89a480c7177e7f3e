"""The planner: the one part that is trained. It says what to do next, one decision at a time.

Invariant: `decide` never raises for what the model wrote. What is malformed is asked for once more; then the step is
given up, and the loop goes on without it. Every answer that was sampled is in `steps`, so that each can be rewarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.agents.agentflow.actions import ANSWER, Decision, parse, schema
from rillflow.agents.agentflow.options import FlowOptions
from rillflow.agents.agentflow.prompts import asked
from rillflow.contracts import Role
from rillflow.types import Said

ROLE = "planner"
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of the planner; `decision` is None where it was malformed."""

    said: Said
    decision: Decision | None


class Planner:
    """`actions` are those it may take. Each answer is a conversation, and a sample, of its own."""

    def __init__(self, role: Role, options: FlowOptions, actions: Sequence[str]) -> None:
        self._role = role
        self._options = options
        self._actions = actions
        self.steps: list[Step] = []

    async def decide(self, question: str, memory: str, *, final: bool = False) -> Decision | None:
        """The next decision; only an answer where it is to be the `final` one. None: degraded, do without."""
        actions = [ANSWER] if final else self._actions
        part, named = "final" if final else "planner", ", ".join(actions)
        prompt = asked(self._options.prompts, part, question=question, memory=memory, actions=named)
        settings: dict[str, Any] = {"max_tokens": self._options.max_tokens}
        if self._options.structured:
            settings["schema"] = schema(actions, self._options.longest)
        for _ in range(_TRIES):
            said = await self._role.ask([{"role": "user", "content": prompt}], **settings)
            decision = None if said.cut else parse(said.text, actions)
            self.steps.append(Step(said, decision))
            if decision is not None:
                return decision
        return None
