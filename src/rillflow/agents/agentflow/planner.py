"""The planner: the one part that is trained. It says what to do next, one decision at a time.

Invariant: `decide` never raises for what the model wrote. Where every answer is malformed the state is asked once more;
then the step is given up, and the loop goes on without it. Every sampled answer is in `states`, so that each can be
rewarded.
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
CONTINUATION = "continuation"  # the planner's policy, where it plays a decision to the end only to rate it
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer of the planner; `decision` is None where it was malformed."""

    said: Said
    decision: Decision | None


@dataclass(frozen=True, slots=True)
class AskedState:
    """One call of the planner: the prompt that describes the state, and the answers sampled from it."""

    prompt: str
    sampled: Sequence[Sampled]

    @property
    def taken(self) -> Decision | None:
        """The decision to carry out: the first well-formed one. The samples are independent, so any would do."""
        return next((one.decision for one in self.sampled if one.decision is not None), None)


class Planner:
    """`actions` are those it may take, `count` how many answers are sampled from each state. Each answer is a
    conversation, and a sample, of its own."""

    def __init__(self, role: Role, options: FlowOptions, actions: Sequence[str], count: int = 1) -> None:
        self._role = role
        self._options = options
        self._actions = actions
        self._count = count
        self.states: list[AskedState] = []

    async def decide(self, question: str, memory: str, left: int, *, final: bool = False) -> AskedState:
        """Sample decisions for a state with `left` steps; only answers where it is to be the `final` one."""
        actions = [ANSWER] if final else self._actions
        part, named = "final" if final else "planner", ", ".join(actions)
        prompt = asked(self._options.prompts, part, question=question, memory=memory, actions=named, left=left)
        settings: dict[str, Any] = {"max_tokens": self._options.max_tokens}
        if self._options.structured:
            settings["schema"] = schema(actions, self._options.longest)
        for _ in range(_TRIES):
            answers = await self._role.ask_many([{"role": "user", "content": prompt}], self._count, **settings)
            sampled = [Sampled(said, None if said.cut else parse(said.text, actions)) for said in answers]
            self.states.append(AskedState(prompt, sampled))
            if self.states[-1].taken is not None:
                break
        return self.states[-1]
