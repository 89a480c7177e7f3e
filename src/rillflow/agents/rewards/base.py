"""Rewards: the arguments that their parameters name, how they are called, and what the shipped ones share.

A reward is asked about one episode, or, if it names `group`, about all episodes of a group at once. It is async or
plain. Plain code never blocks the event loop of the caller nor the exit of the process; code of group rewards never
runs on the loop of the caller at all. A parameter that names nothing known is refused by `parameters_of` before a run
starts. Rewards are finite numbers, one for each episode; anything else is a RewardError.

An answer that is missing or malformed is the fault of the policy and earns nothing. A prompt without a right answer is
at fault itself: that is a RewardError.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property, partial
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from rillflow.config.base import Section
from rillflow.errors import ConfigError, RewardError
from rillflow.types import EpisodeFacts, FinishedEpisode, Scored
from rillflow.wire import in_daemon

Messages = list[dict[str, Any]]

OF_ANSWERS = ("payload", "answer")  # known as soon as there is an answer
NAMES = (*OF_ANSWERS, "messages", "metrics", "episode")
GROUP = "group"
OF_GROUPS = ("payload", GROUP)  # the arguments of a reward of a whole group
# A reward that has one of these among its first two parameters takes its arguments by name.
_NO_PAIR = {"messages", "metrics", "episode", GROUP}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def reward(function: FunctionT) -> FunctionT:
    """Declare a function to be a reward, and check its parameters at once.

    It may name `payload`, `answer`, `messages`, `metrics` and `episode`, or `payload` and `group`; further parameters
    are options of the recipe and need a default. It returns a number, or, for a group, one for each episode. A
    RewardError means that the reward is unknown; it never counts as 0. The function stays callable as before; a
    recipe names it as `reward: file.py:reward`.

    Example:

        @rillflow.reward
        def exact(payload, answer) -> float:
            return float(answer == payload["answer"])
    """
    parameters_of(function, function.__name__, OF_GROUPS if is_of_groups(function) else NAMES)
    return function


class Given:
    """The possible arguments of rewards, by name. `read` makes the messages when the first reward asks for them."""

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
        """The names that are known; an answer alone has fewer than an episode."""
        return OF_ANSWERS if self.episode is None else NAMES

    @cached_property
    def messages(self) -> Messages:
        """The messages of all conversations, with tool calls and results, each once."""
        return self._read()


class Parameters(NamedTuple):
    """How a reward is called: with payload and answer by position (`places`), and with `names` by keyword."""

    places: bool
    names: tuple[str, ...] = ()


def parameters_of(reward: Callable[..., Any], label: str = "", among: Sequence[str] = NAMES) -> Parameters:
    """Return how a reward is called.

    The first two parameters get payload and answer, whatever their names, unless they name something else. Others get
    what they name. A parameter without a default that names nothing `among` the possible arguments is a ConfigError
    about the reward `label`.
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
    """Return whether a reward names `group`: it is called once for each group and not for each episode."""
    return any(one.name == GROUP and one.kind in _NAMED for one in _signature(reward) or ())


def _signature(reward: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a reward without `self`, or None for a builtin without a signature."""
    function = reward if inspect.isroutine(reward) or isinstance(reward, partial) else type(reward).__call__
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    return parameters if function is reward else parameters[1:]


def _are_pair(first: Sequence[str], variadic: bool) -> bool:
    """Return whether these parameters, at most two, get payload and answer by position."""
    if len(first) < 2 and not variadic:
        return False
    return not set(first) & _NO_PAIR and first[:1] != ["answer"] and first[1:] != ["payload"]


def _refusal(label: str, name: str, among: Sequence[str]) -> ConfigError:
    if among is OF_GROUPS and name in NAMES:
        return ConfigError(
            f"reward {label}: its parameter {name!r} belongs to one episode, and a reward that names `group` is called "
            "for all episodes of a group at once",
            f"name payload and group alone; read group[0].{name}",
        )
    known = ", ".join(among)
    return ConfigError(
        f"reward {label}: its parameter {name!r} names nothing that it can be given",
        f"name {known}; give others a default, or a value in the recipe's options",
    )


async def call(reward: Callable[..., Any], given: Given) -> Any:
    """Call a reward, async or plain, and return its value."""
    if isinstance(reward, Sum):
        return await reward.score(given)
    places, names = parameters_of(reward)
    arguments = (given.payload, given.answer) if places else ()
    named = {name: getattr(given, name) for name in names if name in given.names}
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        return await reward(*arguments, **named)
    return await in_thread(partial(reward, *arguments, **named))


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run plain code in a daemon thread, which blocks neither the loop nor the exit of the process."""

    def exited(error: BaseException) -> Exception:  # sys.exit() in a reward must not end the node
        return RewardError(f"the reward raised {type(error).__name__}")

    return await in_daemon(partial(function, *arguments), "reward", exited=exited)


class Part(NamedTuple):
    """One reward of a weighted sum."""

    label: str
    weight: float
    reward: Callable[..., Any]


class Sum:
    """A weighted sum of rewards."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    async def __call__(self, payload: dict[str, Any], answer: Any) -> Scored:
        return await self.score(Given(payload, answer))

    async def score(self, given: Given) -> Scored:
        said = {part.label: as_number(part.label, await call(part.reward, given)) for part in self.parts}
        return Scored(math.fsum(part.weight * said[part.label] for part in self.parts), said)


def as_number(label: str, value: Any) -> float:
    """Return the value of a part as a number; only a single reward may return rewards of several policies."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RewardError(f"the reward {label} is {value!r:.80}, not a finite number", "return a float")
    return float(value)


# Rewards of whole groups


class GroupSum:
    """A weighted sum of rewards of whole groups (`contracts.GroupReward`)."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    async def score(self, group: Sequence[FinishedEpisode]) -> list[Scored]:
        """Return the reward of each episode of a group, in their order."""
        said = {part.label: _numbers(part.label, await _ask(part.reward, group), len(group)) for part in self.parts}
        return [
            Scored(
                math.fsum(part.weight * said[part.label][n] for part in self.parts),
                {label: numbers[n] for label, numbers in said.items()},
            )
            for n in range(len(group))
        ]


async def _ask(reward: Callable[..., Any], group: Sequence[FinishedEpisode]) -> Any:
    known = {"payload": group[0].payload, "group": list(group)}
    named = {name: known[name] for name in parameters_of(reward, among=OF_GROUPS).names}
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        return await in_thread(_run, partial(reward, **named))
    return await in_thread(partial(reward, **named))


def _run(reward: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(reward())


def _numbers(label: str, values: Any, episodes: int) -> list[float]:
    try:
        found = list(values)
    except TypeError:
        raise RewardError(f"the reward {label} is {values!r:.80}, not a list of numbers", "return a list") from None
    if len(found) != episodes:
        raise RewardError(
            f"the reward {label} gave {len(found)} numbers for a group of {episodes} episodes",
            "return one number for each episode of `group`, in its order",
        )
    return [as_number(label, value) for value in found]


# ---------------------------------------------------------------- what the shipped rewards share

GOLD_KEYS = ("answer", "answers", "golden_answers", "target", "solution")
_MOST = 1 << 16  # characters of a right answer


class ShippedReward(Section):
    """A reward whose fields are its options, checked before a run starts.

    Calling it returns a finite number, or raises RewardError if none could be computed; 0 never stands for a failure.
    """

    async def prepare(self) -> None:
        """Prepare what takes longer than a reward may take; called once, before the first."""

    @abstractmethod
    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        """Return the reward of an answer to the prompt with this payload."""


def need(package: str, extra: str) -> None:
    """Raise ConfigError if an optional package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{package} is not installed", f"pip install 'rillflow[{extra}]'")


def text_of(answer: Any) -> str:
    """Return the answer as text: the result of a workflow, or the answer file of a command, or else its output."""
    if answer is None:
        return ""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int | float):
        return str(answer)
    if isinstance(answer, Mapping) and "stdout" in answer:
        return text_of(answer["answer"] if answer.get("answer") is not None else answer["stdout"])
    raise RewardError(
        f"the answer is {type(answer).__name__}, not text",
        "let the workflow return its final answer as text, or write the reward as a function of your own",
    )


def inside(text: str, tag: str) -> str | None:
    """Return the stripped content of the last `<tag>…</tag>` of a text, or None if it has no such tag."""
    opened, closed = f"<{tag}>", f"</{tag}>"
    held, start = None, text.find(opened)
    while start >= 0:
        end = text.find(closed, start + len(opened))
        if end < 0:
            break
        held = text[start + len(opened) : end]
        start = text.find(opened, end + len(closed))
    return held if held is None else held.strip()


def last_number(text: str) -> str | None:
    """Return the last number of a text, without commas, or None if it has no number."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return found[-1].replace(",", "") if found else None


def golds(payload: Mapping[str, Any], key: str | None = None) -> list[str]:
    """Return the right answers of a prompt, under `key` or under the usual names. Each is as good as the others."""
    keys = GOLD_KEYS if key is None else (key,)
    found = next((payload[each] for each in keys if payload.get(each) is not None), None)
    several = found if isinstance(found, list) else [found]
    texts = [str(one) for one in several if isinstance(one, str | int | float)]
    if not texts:
        raise RewardError(
            f"the prompt has no right answer under {' or '.join(keys)}",
            "name its key: `{NAME: {key: …}}` in the recipe",
        )
    if max(map(len, texts)) > _MOST:
        raise RewardError(f"a right answer of the prompt is longer than {_MOST} characters", "name another key")
    return texts
