"""The planner: the one part that is trained. It says what to do next, one decision at a time.

Invariant: `decide` never raises for what the model wrote. What is malformed is asked for once more; then the step is
given up, and the loop goes on without it. Every answer that was sampled is in `steps`, so that each can be rewarded.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from rillflow.agents.agentflow.actions import ANSWER, Decision, parse, schema
from rillflow.agents.agentflow.options import FlowOptions
from rillflow.agents.agentflow.prompts import asked
from rillflow.agents.workflows.sequences import Sequence, Sequences
from rillflow.contracts import Role

ROLE = "planner"
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of the planner; `decision` is None where it was malformed."""

    sequence: Sequence
    decision: Decision | None


class Planner:
    """`actions` are those it may take. Each answer is a sequence of its own: the prompt is made anew every time."""

    def __init__(self, role: Role, sequences: Sequences, options: FlowOptions, actions: Ordered[str]) -> None:
        self._role = role
        self._sequences = sequences
        self._options = options
        self._actions = actions
        self.steps: list[Step] = []

    async def decide(self, question: str, memory: str, *, final: bool = False) -> Decision | None:
        """The next decision; only an answer where it is to be the `final` one. None: degraded, do without."""
        actions = [ANSWER] if final else self._actions
        prompt = asked(
            self._options.prompts,
            "final" if final else "planner",
            question=question,
            memory=memory,
            actions=", ".join(actions),
        )
        shape = schema(actions, self._options.longest) if self._options.structured else None
        for _ in range(_TRIES):
            sequence = await self._sequences.ask(
                self._role,
                [{"role": "user", "content": prompt}],
                schema=shape,
                max_tokens=self._options.max_tokens,
            )
            decision = None if sequence.said.cut else parse(sequence.said.text, actions)
            self.steps.append(Step(sequence, decision))
            if decision is not None:
                return decision
        return None
