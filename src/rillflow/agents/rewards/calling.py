"""Calling a reward, be it async or plain, with what its parameters name.

Invariants: plain code never holds up the loop that its caller lives on, nor the exit of the process. A parameter that
names nothing which rewards are given is refused by `parameters_of`, before anything is played.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from numbers import Real
from typing import Any, NamedTuple

from rillflow.errors import ConfigError, RewardError
from rillflow.types import EpisodeFacts, Scored
from rillflow.wire import in_daemon

Messages = list[dict[str, Any]]

OF_ANSWERS = ("payload", "answer")  # what is known as soon as there is an answer
NAMES = (*OF_ANSWERS, "messages", "metrics", "episode")
GROUP = "group"
OF_GROUPS = ("payload", GROUP)  # what a reward of a whole group is given
_NO_PAIR = {"messages", "metrics", "episode", GROUP}  # a reward with one of these in front has named its parameters
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Given:
    """What rewards are given, by name. `read` makes the messages when the first reward asks for them."""

    def __init__(
        self,
        payload: dict[str, Any],
        answer: Any,
        *,
        read: Callable[[], Messages] = list,
        metrics: Mapping[str, float] | None = None,
        episode: EpisodeFacts | None = None,
    ) -> None:
        self.payload, self.answer, self.episode = payload, answer, episode
        self.metrics = dict(metrics or {})
        self._read = read

    @property
    def names(self) -> Sequence[str]:
        """What is known: of an answer alone less than of an episode."""
        return OF_ANSWERS if self.episode is None else NAMES

    @cached_property
    def messages(self) -> Messages:
        """The messages of all conversations, with tool calls and results, each once."""
        return self._read()


class Parameters(NamedTuple):
    """How a reward is called: payload and answer by their `places` or not, and what it names by keyword."""

    places: bool
    names: tuple[str, ...] = ()


def parameters_of(reward: Callable[..., Any], label: str = "", among: Sequence[str] = NAMES) -> Parameters:
    """Return how a reward is called.

    The first two parameters are payload and answer, whatever they are called, unless they name something else. Others
    are given what they name. ConfigError, about the reward called `label`, where one of them without a default names
    nothing that is `among` what the reward can be given.
    """
    parameters = _signature(reward)
    if parameters is None:
        return Parameters(places=True)
    first = [one.name for one in parameters if one.kind in _POSITIONAL][:2]
    variadic = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    places = GROUP not in among and _are_pair(first, variadic)
    others = [one for one in parameters if not (places and one.name in first)]
    named = [one.name for one in others if one.name in among and one.kind in _NAMED]
    required = [one.name for one in others if one.default is one.empty and one.kind in (*_POSITIONAL, *_NAMED)]
    unknown = [name for name in required if name not in named]
    if unknown:
        raise _refusal(label, unknown[0], among)
    return Parameters(places, tuple(named))


def is_of_groups(reward: Callable[..., Any]) -> bool:
    """Return whether a reward names `group`: it is asked once about each group, not about each episode."""
    return any(one.name == GROUP and one.kind in _NAMED for one in _signature(reward) or ())


def _signature(reward: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a reward, without `self`; None of a builtin that does not tell."""
    function = reward if inspect.isroutine(reward) or isinstance(reward, partial) else type(reward).__call__
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    return parameters if function is reward else parameters[1:]


def _are_pair(first: Sequence[str], variadic: bool) -> bool:
    """Return whether payload and answer are given by their places to these parameters, the first two at most."""
    if len(first) < 2 and not variadic:
        return False
    return not set(first) & _NO_PAIR and first[:1] != ["answer"] and first[1:] != ["payload"]


def _refusal(label: str, name: str, among: Sequence[str]) -> ConfigError:
    if among is OF_GROUPS and name in NAMES:
        return ConfigError(
            f"reward {label}: its parameter {name!r} is of one episode, and a reward that names `group` is asked about "
            "all episodes of a group at once",
            f"name payload and group alone; read group[0].{name}",
        )
    known = ", ".join(among)
    return ConfigError(
        f"reward {label}: its parameter {name!r} names nothing that it can be given",
        f"name {known}; give others a default, or a value in the recipe's options",
    )


async def call(reward: Callable[..., Any], given: Given) -> Any:
    """What a reward says, whichever way it is written."""
    if isinstance(reward, Sum):
        return await reward.score(given)
    places, names = parameters_of(reward)
    arguments = (given.payload, given.answer) if places else ()
    named = {name: getattr(given, name) for name in names if name in given.names}
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        return await reward(*arguments, **named)
    return await in_thread(partial(reward, *arguments, **named))


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run plain code off the loop, in a daemon thread: one that never returns holds nothing up, not even the exit."""

    def exited(error: BaseException) -> Exception:  # sys.exit() in a reward must not end the node
        return RewardError(f"the reward raised {type(error).__name__}")

    return await in_daemon(partial(function, *arguments), "reward", exited=exited)


class Part(NamedTuple):
    label: str
    weight: float
    reward: Callable[..., Any]


class Sum:
    """Rewards that are weighted and added."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    async def __call__(self, payload: dict[str, Any], answer: Any) -> Scored:
        return await self.score(Given(payload, answer))

    async def score(self, given: Given) -> Scored:
        said = {part.label: as_number(part.label, await call(part.reward, given)) for part in self.parts}
        return Scored(math.fsum(part.weight * said[part.label] for part in self.parts), said)


def as_number(label: str, value: Any) -> float:
    """Return the one number that a part gives: rewards of several policies are a workflow's, or of one function's,
    business."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RewardError(f"the reward {label} is {value!r:.80}, not a finite number", "return a float")
    return float(value)
