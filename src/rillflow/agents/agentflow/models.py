"""The models of the loop: the planner, which alone is trained, with its decisions; and the verifier.

A decision is a JSON object of exactly three texts. Invariants: `parse` accepts what `schema` describes, with any
whitespace that JSON allows and nothing more; it never raises. So a decision means the same whether an engine was held
to the schema or the model wrote it freely. `decide` never raises for what the model wrote: if every answer is
malformed, the state is asked once more; then the step is given up, and the loop goes on without it. Every sampled
answer is in `states`, so that each can be rewarded.

A process reward model reads a state and a decision as `prm_row` writes them, for labels, training and rewards alike.
The state is the prompt that the planner was asked with: it holds the question and every earlier decision with its
result. The result of the decision itself is left out: the model rates the decision, which is trained, and not the
result.

The verifier says whether enough is known. It is conservative: if its answer cannot be read, was cut or is late, the
loop goes on.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from rillflow.agents.agentflow.options import Endpoint, FlowOptions, asked
from rillflow.contracts import Episode, Role
from rillflow.types import Said
from rillflow.types.base import Wire

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

THINK, ANSWER = "think", "answer"  # the actions that need no tool
LONGEST = 4000  # characters of one field; a longer one is malformed


class Decision(Wire, frozen=True):
    """One step of a planner."""

    thought: str
    action: str
    action_input: str

    def written(self) -> str:
        """Return the text that the planner is taught to write."""
        return json.dumps(
            {"thought": self.thought, "action": self.action, "action_input": self.action_input}, ensure_ascii=False
        )


def schema(actions: Sequence[str], longest: int) -> dict[str, Any]:
    """Return the JSON schema of a decision for one of `actions`, with texts of at most `longest` characters.

    The bound lets a decision end before the answer is cut, which would leave broken JSON.
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
    """Return the decision, or None if the text is malformed or its action is not one of `actions` (if given)."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.keys() != {"thought", "action", "action_input"}:
        return None
    if not all(isinstance(value, str) and len(value) <= LONGEST for value in said.values()):
        return None
    return Decision(**said) if actions is None or said["action"] in actions else None


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


ROLE = "planner"
CONTINUATION = "continuation"  # the role in which the planner's policy plays on from a decision, to rate it
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer of the planner; `decision` is None if it was malformed."""

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
    """Samples decisions. `actions` are those that it may take; `count` answers are sampled from each state, and each
    answer is a separate conversation and a separate sample."""

    def __init__(self, role: Role, options: FlowOptions, actions: Sequence[str], count: int = 1) -> None:
        self._role = role
        self._options = options
        self._actions = actions
        self._count = count
        self.states: list[AskedState] = []

    async def decide(self, question: str, memory: str, left: int, *, final: bool = False) -> AskedState:
        """Sample decisions for a state with `left` steps. With `final`, the only action is to answer."""
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


# ---------------------------------------------------------------- the verifier

VERIFIER = "verifier"
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"sufficient": {"type": "boolean"}},
    "required": ["sufficient"],
    "additionalProperties": False,
}
_MAX_TOKENS = 24


class Verifier(Protocol):
    async def sufficient(self, question: str, memory: str) -> bool: ...


class NoVerifier:
    """Only the planner ends a task."""

    async def sufficient(self, question: str, memory: str) -> bool:
        return False


class PolicyVerifier:
    """A role of the workflow. Its calls are the session's: the recipe's `untrained` keeps them out of training."""

    def __init__(self, role: Role, options: FlowOptions) -> None:
        self._role = role
        self._options = options
        self._settings: dict[str, Any] = {"max_tokens": _MAX_TOKENS}
        if options.structured:
            self._settings["schema"] = SCHEMA

    async def sufficient(self, question: str, memory: str) -> bool:
        prompt = asked(self._options.prompts, "verifier", question=question, memory=memory)
        said = await self._role.ask([{"role": "user", "content": prompt}], **self._settings)
        return says_sufficient(said.text)


class EndpointVerifier:
    """A model behind any OpenAI-compatible server. An error of the server counts as "not sufficient"."""

    def __init__(self, endpoint: Endpoint, options: FlowOptions) -> None:
        self._endpoint = endpoint
        self._options = options

    async def sufficient(self, question: str, memory: str) -> bool:
        import openai

        prompt = asked(self._options.prompts, "verifier", question=question, memory=memory)
        try:
            response = await client_of(self._endpoint).chat.completions.create(
                model=self._endpoint.model,
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
                timeout=self._endpoint.seconds,
            )
        except openai.OpenAIError as error:
            log.warning("the verifier at %s did not answer: %s", self._endpoint.url, type(error).__name__)
            return False
        return says_sufficient(response.choices[0].message.content or "")


def verifier_of(episode: Episode, options: FlowOptions) -> Verifier:
    """Return the verifier that the recipe names."""
    if options.verifier == "none":
        return NoVerifier()
    if options.verifier == "role":
        return PolicyVerifier(episode.role(VERIFIER), options)
    return EndpointVerifier(options.verifier, options)


def says_sufficient(text: str) -> bool:
    """Return whether the text is JSON with `sufficient` true; anything else counts as false."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("sufficient") is True


@cache
def client_of(endpoint: Endpoint) -> AsyncOpenAI:
    """Return the client that all episodes of a process share. Its connections belong to one event loop."""
    return new_client(endpoint)


def new_client(endpoint: Endpoint) -> AsyncOpenAI:
    """Return a new client, which the caller closes."""
    import openai

    key = os.environ.get(endpoint.key_variable, "") if endpoint.key_variable else ""
    return openai.AsyncOpenAI(base_url=endpoint.url, api_key=key or "none", max_retries=2)
