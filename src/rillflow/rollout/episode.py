"""One episode: the user's workflow, then the user's reward, each with a deadline and each failure with its cause.

`Surroundings` are the tools, environments, roles and options of a recipe, which all episodes of a node share.

Invariant: an episode ends with finite rewards or with an EpisodeFailed that says why; a reward that raised, hung or
was not a number is never 0.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Protocol

import openai

from rillflow.agents.command import AgentFailed
from rillflow.agents.environments.registry import environment_factory
from rillflow.agents.rewards.base import Given, call
from rillflow.agents.roles import Chat, PolicyRole
from rillflow.agents.tools.toolbox import OpenToolbox, open_toolbox
from rillflow.config import Recipe
from rillflow.config.tracebacks import UserErrors, located, place_of
from rillflow.contracts import Clock, Environment, Toolbox
from rillflow.errors import ConfigError, WorkflowError
from rillflow.gateway.server import AGENT_HEADER
from rillflow.rollout.direct_client import DirectClient
from rillflow.rollout.rewards import rewards_of
from rillflow.types import MODEL_WAIT, Prompt, Scored, Task


@dataclass(frozen=True)
class Surroundings:
    """What a recipe gives its workflow. `environment` makes one for each episode; `errors` collects user errors."""

    roles: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: Toolbox = field(default_factory=OpenToolbox)
    environment: Callable[[], Environment] | None = None
    errors: UserErrors = field(default_factory=UserErrors)

    def new_environment(self) -> Environment:
        """Return the environment of one episode."""
        if self.environment is None:
            raise ConfigError("the workflow uses an environment and the recipe names none", "give `environment:`")
        return self.environment()

    def policy_of(self, role: str, policies: tuple[str, ...]) -> str:
        """Return the policy of a role: the recipe's choice, or the policy of the same name, or the first policy."""
        return self.roles.get(role) or (role if role in policies else policies[0])


async def open_surroundings(recipe: Recipe) -> tuple[Surroundings, OpenToolbox]:
    """Return the surroundings and the toolbox, which the caller closes. An error leaves nothing open."""
    hook = recipe.environment
    made = None if hook is None else environment_factory(hook.name, hook.options)
    errors = UserErrors()
    toolbox = await open_toolbox(recipe.tools, errors)
    return Surroundings(recipe.roles, recipe.options, toolbox, made, errors), toolbox


log = logging.getLogger(__name__)

MOST_METRICS = 64
_METRIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
GIVE_UP_SECONDS = 1.0  # for cancelled code of the user to clean up
_LOOK = 0.01  # least seconds between two looks at a clock that may stand still

Workflow = Callable[[Any], Awaitable[Any]]
Reward = Callable[..., Any]


class Give(Protocol):
    """Takes a reward for the session, or for a part of it."""

    def __call__(
        self, value: float, *, call: str | None, turn: int | None, leaf: int | None, policy: str | None
    ) -> object: ...


class EpisodeFailed(Exception):
    """Why an episode has no answer or reward; `cause` is what is counted.

    `detail` is the exit code of a command, or the name of the exception that a workflow raised.
    """

    def __init__(self, cause: str, error: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {error}")
        self.cause = cause
        self.error = error
        self.detail = detail


class RunningEpisode:
    """What a workflow gets (`contracts.Episode`). `url` is where its session is at the gateway."""

    def __init__(
        self,
        task: Task,
        *,
        client: openai.AsyncOpenAI,
        policies: Sequence[str],
        url: str,
        api_key: str,
        clock: Clock,
        seconds: float,
        give: Give,
        surroundings: Surroundings | None = None,
        chat: Chat | None = None,
    ) -> None:
        self.task = task
        self.policies = tuple(policies)
        self.anthropic_url = url
        self.base_url = f"{url}/v1"
        self.api_key = api_key
        self.seed = task.seed
        self._shared, self._chat = client, chat
        self._give = give
        self._surroundings = surroundings or Surroundings()
        self._environment: Environment | None = None
        self.metrics: dict[str, float] = {}
        self.roles: set[str] = set()  # those that it has named
        self._clock = clock
        self._end = clock.monotonic() + seconds

    @cached_property
    def client(self) -> openai.AsyncOpenAI:
        """A copy of the node's client, which shares its connection pool and calls the gateway directly if it can."""
        made = self._shared.with_options(base_url=self.base_url, api_key=self.api_key)
        if self._chat is not None and isinstance(made, DirectClient):
            made.call_directly(self._chat)
        return made

    @property
    def prompt(self) -> Prompt:
        return self.task.prompt

    @property
    def payload(self) -> dict[str, Any]:
        return self.task.prompt.payload

    @property
    def model(self) -> str:
        return self.policies[0]

    @property
    def options(self) -> Mapping[str, Any]:
        return self._surroundings.options

    @property
    def tools(self) -> Toolbox:
        return self._surroundings.tools

    @property
    def environment(self) -> Environment:
        if self._environment is None:
            self._environment = self._surroundings.new_environment()
        return self._environment

    @property
    def evaluating(self) -> bool:
        return self.task.lane == "eval"

    def seconds_left(self) -> float:
        return max(0.0, self._end - self._clock.monotonic())

    def role(self, name: str) -> PolicyRole:
        self.roles.add(name)
        policy = self._surroundings.policy_of(name, self.policies)
        return PolicyRole(name, policy, partial(self.agent, name), self._chat)

    async def close(self) -> None:
        """Close the environment, if it was opened; an error of that does not fail the episode."""
        if self._environment is not None:
            try:
                async with asyncio.timeout(GIVE_UP_SECONDS):
                    await self._environment.close()
            except Exception as error:
                told = self._surroundings.errors.note("environment", error)
                log.warning("an environment could not be closed: %s%s", located(error), told)

    def agent(self, name: str) -> openai.AsyncOpenAI:
        self.roles.add(name)
        return self.client.with_options(default_headers={AGENT_HEADER: name})

    def reward(
        self,
        value: float,
        *,
        call: str | None = None,
        turn: int | None = None,
        leaf: int | None = None,
        policy: str | None = None,
    ) -> None:
        self._give(value, call=call, turn=turn, leaf=leaf, policy=policy)

    def metric(self, name: str, value: float) -> None:
        add_metric(self.metrics, name, value)


def add_metric(metrics: dict[str, float], name: str, value: float) -> None:
    """Add a metric. WorkflowError if the ledger would refuse it."""
    if not _METRIC.fullmatch(name):
        raise WorkflowError(f"{name!r:.80} cannot be the name of a metric", "letters, digits and . _ - /")
    number = float(value)
    if not math.isfinite(number):
        raise WorkflowError(f"the metric {name} is {number}", "give a finite number")
    if name not in metrics and len(metrics) >= MOST_METRICS:
        raise WorkflowError(f"an episode has at most {MOST_METRICS} metrics", "give fewer")
    metrics[name] = number


async def play(workflow: Workflow, episode: RunningEpisode) -> Any:
    """The workflow's answer. Whatever it raises, or a deadline it passes, is an EpisodeFailed."""
    seconds = episode.seconds_left()
    try:
        return await _within(episode.seconds_left, _shielded(workflow(episode)))
    except OutOfTime as error:
        raise EpisodeFailed("timeout", f"the workflow took longer than {seconds:.0f} s{_waited_at(error)}") from error
    except openai.APIStatusError as error:
        cause = "context_overflow" if error.code == "context_length_exceeded" else "workflow_error"
        raise EpisodeFailed(cause, located(error), type(error).__name__) from error
    except AgentFailed as error:
        raise EpisodeFailed("agent_error", error.message, "" if error.code is None else str(error.code)) from error
    except Exception as error:
        raise EpisodeFailed("workflow_error", located(error), type(error).__name__) from error


class OutOfTime(Exception):
    """Our deadline has passed; a TimeoutError may as well be the user's own. Its traceback ends where it waited."""


_MODEL_CALLS = ("openai", "anthropic", "rillflow.gateway", "rillflow.agents.roles")  # packages that ask for an answer


def _waited_at(error: OutOfTime) -> str:
    place = place_of(error)
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    asked = any(module == name or module.startswith(f"{name}.") for module in modules for name in _MODEL_CALLS)
    return (f", {MODEL_WAIT}" if asked else "") + (f", waiting at {place}" if place else "")


async def _shielded(work: Awaitable[Any]) -> Any:
    """The user's code may try to end the process, or raise the cancellation of something else: both are its errors."""
    task = asyncio.current_task()
    try:
        return await work
    except SystemExit as error:
        raise WorkflowError(f"it called sys.exit({error.code!r})") from error
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():
            raise
        raise WorkflowError("it raised CancelledError, though nobody had cancelled it") from error


async def _within(left: Callable[[], float], work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`; raises OutOfTime once no second is `left`, even when the work swallows its cancellation.

    Such work is left behind: its session is closed, its task ends when it wants to.
    """
    task = asyncio.create_task(work)
    try:
        # The clock of a node that training has paused stands still: then it is looked at again.
        while not task.done() and (seconds := left()) > 0:
            await asyncio.wait({task}, timeout=max(seconds, _LOOK))
        if not task.done():
            raise OutOfTime("the deadline has passed")
    except OutOfTime as error:
        raise error.with_traceback(await _give_up(task)) from None
    except BaseException:
        await _give_up(task)
        raise
    return task.result()


async def _give_up(task: asyncio.Task[Any]) -> TracebackType | None:
    """Cancel the task; return where it waited, if it ends by that."""
    task.cancel()
    await asyncio.wait({task}, timeout=GIVE_UP_SECONDS)
    if not task.done():
        log.warning("a workflow or reward goes on although it was cancelled: it catches CancelledError")
    elif not task.cancelled():
        task.exception()  # whatever it raised on its way out is not news
    else:
        try:
            task.result()
        except asyncio.CancelledError as error:
            return error.__traceback__
    return None


async def score(
    reward: Reward | None,
    given: Given,
    seconds: float,
    policies: Sequence[str],
    *,
    metrics: dict[str, float] | None = None,
) -> dict[str, float]:
    """A finite reward of each policy that was given one, or EpisodeFailed("reward_error"); see `rewards_of`.

    Without a reward function the answer is the reward. The parts of a reward that says which it has go to `metrics`.
    """
    try:
        value = given.answer if reward is None else await _call_reward(reward, given, seconds)
        if isinstance(value, Scored):
            for name, part in value.parts.items():
                add_metric({} if metrics is None else metrics, f"reward/{name}", part)
        return rewards_of(value, policies, answer_is_reward=reward is None)
    except OutOfTime as error:
        raise EpisodeFailed(
            "reward_error", f"the reward took longer than {seconds:.0f} s{_waited_at(error)}"
        ) from error
    except Exception as error:
        raise EpisodeFailed("reward_error", located(error)) from error


async def _call_reward(reward: Reward, given: Given, seconds: float) -> Any:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds  # a reward is never paused
    return await _within(lambda: end - loop.time(), _shielded(call(reward, given)))
