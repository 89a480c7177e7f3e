"""What agents say, and what they get to see of environments."""

from __future__ import annotations

import json
from typing import Any

from rillflow.types.base import Wire


class Observation(Wire, frozen=True):
    """What an environment says after a reset or a step.

    `reward` is what this step alone earned, `actions` those possible now, where the environment knows them; `info` is
    for the workflow and its metrics, not for the model.
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
    """One answer of a role. `call` is what `episode.reward(…, call=…)` takes; `cut` tells that it hit its limit;
    `message` is what to append to the conversation."""

    text: str
    uses: list[ToolUse]
    call: str
    cut: bool
    message: dict[str, Any]

    def json(self) -> Any:
        """The answer as JSON, or None where it is none."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


class EpisodeFacts(Wire, frozen=True):
    """What a reward function that names `episode` is told of it: ids of its task and prompt, the run's policies, its
    seed, whether it is played for an evaluation only, and the seconds that it took."""

    task: str
    prompt: str
    policies: list[str]
    seed: int
    evaluating: bool
    seconds: float


class FinishedEpisode(Wire, frozen=True):
    """One of the episodes that a reward of a whole group compares: what rewards of single episodes are given, and what
    the recipe's other rewards came to (0 where it has none)."""

    payload: dict[str, Any]
    answer: Any
    messages: list[dict[str, Any]]
    metrics: dict[str, float]
    episode: EpisodeFacts
    reward: float


class Scored(float):
    """A reward that says of which `parts` it is made: they become metrics of the episode. A number like any other."""

    parts: dict[str, float]

    def __new__(cls, reward: float, parts: dict[str, float]) -> Scored:
        made = super().__new__(cls, reward)
        made.parts = parts
        return made
