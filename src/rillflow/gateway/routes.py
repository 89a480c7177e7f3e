"""The routes of a gateway: those of the providers, and our own for rewards, tasks and engines.

The routes of agents exist twice, with the session in the path (`in_session`) and without, by the session's key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from rillflow.gateway import shapes
from rillflow.gateway.dialects import chat, completions, messages, responses
from rillflow.gateway.feed import Ended, EndSession, OutsideTask
from rillflow.types.routes import JSON, Route, raw, routes_of

EVENTS, NDJSON = "text/event-stream", "application/x-ndjson"
SESSION = "/s/{session}"

Givers = Literal["nobody", "run", "agent"]
Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Names = Annotated[list[str], msgspec.Meta(max_length=1000)]

_OPENAI, _ANTHROPIC = (shapes.ErrorAnswer,), (shapes.AnthropicErrorAnswer,)
_EITHER = _OPENAI + _ANTHROPIC
_COUNTS = "only counts: the session does not change"
_SAMPLES = "an answer that is not read is aborted, and its node in the session's tree is never trained on"
_HOLD = "a hold is identified by its reason"


class GiveReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reward for one answer (`call`: the id that the agent saw), for the answers of the n-th call (`turn`, from 0),
    for one leaf of a policy's tree, or else for the whole session."""

    value: float
    call: str | None = None
    turn: int | None = None
    leaf: int | None = None
    policy: str | None = None


class Rewarded(msgspec.Struct, frozen=True, kw_only=True):
    session: str


class TakeTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request one task, and wait up to `wait` seconds for it."""

    wait: float = 0.0


class HoldEngines(msgspec.Struct, forbid_unknown_fields=True):
    """Hold engines (default: all) for `seconds` (default: until they are released or this gateway ends)."""

    reason: Reason
    engines: Names | None = None
    move: bool = False
    seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None


class ReleaseEngines(msgspec.Struct, forbid_unknown_fields=True):
    """Drop the hold of a reason (default: at all engines)."""

    reason: Reason
    engines: Names | None = None


def _asking(summary: str, dialect: Any, answer: type) -> Route[Any, Any]:
    return raw(
        "POST", dialect.PATH, "node", summary=summary, body=get_type_hints(dialect.decode)["return"], again=_SAMPLES,
        answers={JSON: (answer,), EVENTS: ()}, errors=_ANTHROPIC if dialect is messages else _OPENAI,
    )  # fmt: skip


class AgentRoutes:
    """The routes of the providers, for agents."""

    ask_chat = _asking("OpenAI chat completions", chat, shapes.ChatAnswer)
    ask_completions = _asking("OpenAI completions", completions, shapes.CompletionAnswer)
    ask_responses = _asking("OpenAI responses", responses, shapes.ResponsesAnswer)
    ask_messages = _asking("Anthropic messages", messages, shapes.MessagesAnswer)
    count_input = raw(
        "POST", responses.COUNT_PATH, "node", summary="How many tokens the prompt of a response has",
        body=responses.ResponsesRequest, again=_COUNTS, answers={JSON: (shapes.ResponsesCount,)}, errors=_OPENAI,
    )  # fmt: skip
    count = raw(
        "POST", messages.COUNT_PATH, "node", summary="How many tokens the prompt of a message has",
        body=messages.CountRequest, again=_COUNTS, answers={JSON: (shapes.CountAnswer,)}, errors=_ANTHROPIC,
    )  # fmt: skip
    response = raw(
        "GET", f"{responses.PATH}/{{response}}", "node", summary="A response of this session",
        answers={JSON: (shapes.ResponsesAnswer,)}, errors=_OPENAI,
    )  # fmt: skip
    models = raw(
        "GET", "/v1/models", "node", summary="The policies, as models",
        answers={JSON: (shapes.Models, shapes.AnthropicModels)}, errors=_EITHER, headers=("anthropic-version",),
    )  # fmt: skip
    model = raw(
        "GET", "/v1/models/{model}", "node", summary="One policy, as a model",
        answers={JSON: (shapes.Model, shapes.AnthropicModel)}, errors=_EITHER, headers=("anthropic-version",),
    )  # fmt: skip


ASKING = {route.path: route for route in routes_of(AgentRoutes) if EVENTS in route.answers}


def in_session(route: Route[Any, Any]) -> Route[Any, Any]:
    """Return the form of an agent's route that names the session."""
    return replace(route, path=f"{SESSION}{route.path}")


class ControlRoutes:
    """Rewards over HTTP, and sessions for agents from outside."""

    reward = raw(
        "POST", f"{SESSION}/reward", "node", summary="Give a reward to a session or a part of it", body=GiveReward,
        again="sets the reward of what it names", answers={JSON: (Rewarded,)}, errors=_OPENAI,
    )  # fmt: skip
    end = raw(
        "POST", f"{SESSION}/end", "node", summary="End a session that was taken from the feed", body=EndSession,
        again="the first end counts, and its outcome is repeated", answers={JSON: (Ended,)}, errors=_OPENAI,
    )  # fmt: skip
    sessions = raw(
        "POST", "/sessions", "node", summary="Take one task, if one comes in time", body=TakeTask, waits=True,
        again="a task whose agent does not end it is played again after its deadline",
        answers={JSON: (OutsideTask,)}, errors=_OPENAI, optional=True,
    )  # fmt: skip
    feed = raw(
        "GET", "/feed", "node", summary="A stream of tasks, one JSON object a line, as slots become free", waits=True,
        answers={NDJSON: (OutsideTask,)}, errors=_OPENAI, query=("capacity", "playing"),
    )  # fmt: skip


class EngineControlRoutes:
    """The rollout manager, for operators and the resource manager."""

    hold = raw(
        "POST", "/engines/hold", "operator", summary="Hold engines, or move their calls", body=HoldEngines,
        again=_HOLD, answers={JSON: ()}, errors=_OPENAI,
    )  # fmt: skip
    release = raw(
        "POST", "/engines/release", "operator", summary="Release engines from a hold", body=ReleaseEngines,
        again=_HOLD, answers={JSON: ()}, errors=_OPENAI,
    )  # fmt: skip
    engines = raw(
        "GET", "/engines", "reader", summary="Every engine, and every hold", answers={JSON: ()},
        errors=_OPENAI,
    )  # fmt: skip
