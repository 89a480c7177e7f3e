"""The workflow of any environment, turn by turn: an observation goes to the model, its answer is the next action.

The recipe names the `environment`; its `options` are those of `GameOptions`. With the whole history an episode is one
path of the token tree and one sample. With a window (`history`) each turn that drops a message begins another path.

`demonstrations` plays an environment's own gold player and returns the episodes as rows for `rillflow fit` with
`task: sft`, in the form in which `play` records them. The same arguments give the same rows. Every demonstration wins.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import openai
from pydantic import Field

from rillflow.agents.environments.registry import ENVIRONMENTS, environment_factory
from rillflow.agents.options import read_options
from rillflow.config import resolve_object
from rillflow.config.base import Section
from rillflow.errors import ConfigError
from rillflow.types import Observation, Said

if TYPE_CHECKING:
    from rillflow.contracts import Episode, Role

Message = dict[str, Any]
ACTION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"action": {"type": "string"}},
    "required": ["action"],
    "additionalProperties": False,
}


class GameOptions(Section):
    """The options of the workflow `game`."""

    instructions: str | None = Field(None, description="what the model is told before it sees anything")
    action: Literal["text", "json"] = Field("text", description="an action is the answer's last line, or its `action`")
    history: Annotated[int, Field(ge=1)] | None = Field(None, description="last turns that are kept; default: all")
    turns: Annotated[int, Field(ge=1)] = Field(50, description="most answers of an episode")
    invalid: Annotated[int, Field(ge=0)] | None = Field(
        None, description="so many actions that make no sense are forgiven; default: all"
    )
    reward: Literal["sum", "final"] = Field("sum", description="of all steps, or of the last one")
    step_rewards: bool = Field(
        False, description="each answer also gets what its own step earned; needs trainer.step_rewards"
    )
    show_actions: bool = Field(False, description="possible actions are listed, where the environment knows them")


async def play(episode: Episode) -> float:
    """Play one episode and return its reward. A full context ends it with the reward so far."""
    options = read_options("options", episode.options, GameOptions)
    role = episode.role("player")
    seen = await episode.environment.reset(episode.payload, episode.seed)
    messages = opening(seen, options)
    head = len(messages)
    earned = [0.0]
    forgiven = options.invalid
    for _ in range(options.turns):
        if seen.done:
            break
        said = await _ask(role, window(messages, head, options.history), options, first=len(messages) == head)
        if said is None:
            break
        seen = await episode.environment.step(action_of(said.text, options))
        earned.append(seen.reward)
        if options.step_rewards:
            episode.reward(seen.reward, call=said.call)
        messages += [said.message, observed(seen, options)]
        if seen.info.get("invalid") and forgiven is not None:
            forgiven -= 1
            if forgiven < 0:
                break
    return sum(earned) if options.reward == "sum" else earned[-1]


async def _ask(role: Role, messages: Sequence[Message], options: GameOptions, *, first: bool) -> Said | None:
    """Return the next answer, or None if the context is full. If the first prompt does not fit, that is an error."""
    try:
        return await role.ask(messages, schema=ACTION_SCHEMA if options.action == "json" else None)
    except openai.APIStatusError as error:
        if first or error.code != "context_length_exceeded":
            raise
        return None


def opening(seen: Observation, options: GameOptions) -> list[Message]:
    """Return the messages before the first action."""
    told = [{"role": "system", "content": options.instructions}] if options.instructions else []
    return [*told, observed(seen, options)]


def observed(seen: Observation, options: GameOptions) -> Message:
    """Return an observation as a message of the user."""
    text = seen.text
    if options.show_actions and seen.actions and not seen.done:
        text = f"{text}\nPossible: {'; '.join(seen.actions)}"
    return {"role": "user", "content": text}


def spoken(action: str, options: GameOptions) -> Message:
    """Return the answer that means this action."""
    if options.action == "text":
        return {"role": "assistant", "content": action}
    return {"role": "assistant", "content": json.dumps({"action": action}, ensure_ascii=False)}


def window(messages: list[Message], head: int, turns: int | None) -> list[Message]:
    """Return the opening and the last turns; a turn is an answer and the observation after it."""
    if turns is None or len(messages) - head <= 2 * turns:
        return messages
    return messages[:head] + messages[len(messages) - 2 * turns :]


def action_of(text: str, options: GameOptions) -> str:
    """Return the action in an answer, or an empty string, to which the environment replies that it is invalid."""
    if options.action == "json":
        read = Said(text=text, uses=[], call="", cut=False, message={}).json()
        action = read.get("action") if isinstance(read, dict) else None
        return action.strip() if isinstance(action, str) else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return last[len("action:") :].strip() if last.lower().startswith("action:") else last


def demonstrations(
    environment: str,
    split: str,
    count: int,
    seed: int,
    *,
    options: Mapping[str, Any] | None = None,
    game: Mapping[str, Any] | None = None,
    prompts: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield rows for sft; `options` are the environment's, `game` the workflow's, `prompts` the generator's."""
    if environment not in ENVIRONMENTS or ENVIRONMENTS[environment].prompts is None:
        raise ConfigError(f"there are no lessons for {environment!r}", "name a shipped environment that makes prompts")
    made = environment_factory(environment, options or {})()
    generate = resolve_object(ENVIRONMENTS[environment].prompts or "")
    rows = generate(split=split, count=count, seed=seed, **(prompts or {}))
    with asyncio.Runner() as runner:
        played = _played(made, rows, read_options("game", game or {}, GameOptions))
        try:
            while (row := runner.run(anext(played, None))) is not None:
                yield row
        finally:
            runner.run(made.close())


async def _played(made: Any, rows: Iterator[dict[str, Any]], options: Any) -> AsyncIterator[dict[str, Any]]:
    if not hasattr(made, "plan"):
        raise ConfigError("the environment has no gold player", "write demonstrations yourself")
    for row in rows:
        seen = await made.reset(row["payload"], 0)
        messages = opening(seen, options)
        plan = await made.plan()
        earned = 0.0
        for action in plan:
            seen = await made.step(action)
            earned += seen.reward
            messages += [spoken(action, options), observed(seen, options)]
        if not plan or not seen.done or earned < 1.0:
            continue  # some gold paths of TextWorldExpress do not win
        yield {"id": row["id"], "payload": {"messages": messages[:-1]}}
