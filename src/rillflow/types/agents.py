"""Answers of agents, observations of environments, and the facts that rewards are given."""

from __future__ import annotations

import json
from typing import Any

from rillflow.types.base import Wire


class Observation(Wire, frozen=True):
    """An environment's answer to a reset or a step.

    `reward` is that of this step alone. `actions` are those possible now, if the environment knows them. `info` is for
    the workflow and its metrics, not for the model.

    Example:

        rillflow.Observation("The box is open.", reward=1.0, done=True)
    """

    text: str
    reward: float = 0.0
    done: bool = False
    actions: list[str] | None = None
    info: dict[str, Any] = {}


class ToolUse(Wire, frozen=True):
    """A call of a tool, as the model wrote it: `arguments` may be anything."""

    id: str
    name: str
    arguments: str


class Said(Wire, frozen=True):
    """One answer of a role.

    `uses` are its tool calls. `call` is its id for `episode.reward(…, call=…)`; `cut` is true if it hit its token
    limit; append `message` to the conversation.

    Example:

        said = await episode.role("agent").ask(messages)
        episode.reward(0.0 if said.cut else 1.0, call=said.call)
        messages.append(said.message)
    """

    text: str
    uses: list[ToolUse]
    call: str
    cut: bool
    message: dict[str, Any]

    def json(self) -> Any:
        """Return the answer parsed as JSON, or None if it is not valid JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


class EpisodeFacts(Wire, frozen=True):
    """The argument `episode` of a reward function: ids of the task and prompt, the run's policies, the seed, whether
    the episode is an evaluation, and the seconds that it took."""

    task: str
    prompt: str
    policies: list[str]
    seed: int
    evaluating: bool
    seconds: float


class FinishedEpisode(Wire, frozen=True):
    """One of the episodes that a reward of a whole group compares: the arguments that a reward of one episode gets, and
    the sum of the recipe's other rewards (0 if it has none)."""

    payload: dict[str, Any]
    answer: Any
    messages: list[dict[str, Any]]
    metrics: dict[str, float]
    episode: EpisodeFacts
    reward: float


class Scored(float):
    """A reward with its `parts`, which become metrics of the episode. It is a float."""

    parts: dict[str, float]

    def __new__(cls, reward: float, parts: dict[str, float]) -> Scored:
        made = super().__new__(cls, reward)
        made.parts = parts
        return made
