"""The contracts of a workflow: tools, an environment, roles, and the episode that has them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rillflow.types import Observation, Prompt, Said

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class Tool(Protocol):
    """Something that a model may call. `parameters` is the JSON schema of its arguments."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...

    @property
    def timeout(self) -> float:
        """Seconds that a call may take."""

    async def call(self, arguments: Mapping[str, Any], episode: Episode | None) -> str:
        """Return the text that the model reads. Arguments match the schema; the model also reads a ToolError."""


class Toolbox(Protocol):
    """The tools of a recipe. A call never raises for a model's mistake: the model reads a text that begins `error:
    `."""

    @property
    def schemas(self) -> list[Any]:
        """The tools in the OpenAI shape, for `tools=` of a call."""

    def names(self) -> Sequence[str]: ...

    async def call(self, name: str, arguments: str | Mapping[str, Any], episode: Episode | None = None) -> str:
        """`arguments` is the model's JSON text, or the mapping parsed from it."""


class Environment(Protocol):
    """A world that one episode acts in. Methods are called one at a time; `close` may come at any time, once."""

    async def reset(self, payload: Mapping[str, Any], seed: int) -> Observation:
        """Start the world from the beginning: the same payload and seed give the same world."""

    async def step(self, action: str) -> Observation:
        """Carry out an action and return what follows. An invalid action gets an observation that says so; do not
        raise."""

    async def close(self) -> None: ...


class Role(Protocol):
    """A part in a workflow, played by a policy. Every call of `client` carries the role's name."""

    @property
    def name(self) -> str: ...

    @property
    def policy(self) -> str: ...

    @property
    def client(self) -> AsyncOpenAI: ...

    async def ask(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Said:
        """Return one answer. With a JSON `schema` the answer always matches it; `settings` are those of the OpenAI
        client."""

    async def ask_many(
        self,
        messages: Sequence[dict[str, Any]],
        count: int,
        *,
        tools: Sequence[Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> list[Said]:
        """Return several independent answers to the same messages. Each has its own `call` id, for its reward."""


@runtime_checkable
class Episode(Protocol):
    """The argument of a workflow: a prompt, clients for its policies, tools, an environment, a seed and a deadline.

    `client` is a plain OpenAI client whose base URL is this episode's session at the gateway; any other client
    can be pointed at `base_url` (OpenAI) or `anthropic_url` (Anthropic) with `api_key`. `model` is the name of the
    first policy.
    """

    @property
    def prompt(self) -> Prompt: ...

    @property
    def payload(self) -> dict[str, Any]: ...

    @property
    def client(self) -> AsyncOpenAI: ...

    @property
    def model(self) -> str: ...

    @property
    def policies(self) -> Sequence[str]: ...

    @property
    def base_url(self) -> str: ...

    @property
    def anthropic_url(self) -> str: ...

    @property
    def api_key(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def options(self) -> Mapping[str, Any]:
        """The recipe's `options`, which only the workflow interprets."""

    @property
    def tools(self) -> Toolbox:
        """The recipe's `tools`; empty if it names none."""

    @property
    def environment(self) -> Environment:
        """This episode's instance of the recipe's `environment`; it is closed when the episode has ended."""

    @property
    def evaluating(self) -> bool:
        """Whether the episode is an evaluation. It is not trained on, and a workflow must not learn from it either."""

    def seconds_left(self) -> float: ...

    def role(self, name: str) -> Role:
        """Return a role of the workflow, played by the policy that the recipe's `roles` name for it."""

    def agent(self, name: str) -> AsyncOpenAI:
        """Return a client for the calls of one of several agents. Recipes may compare each agent's samples
        separately."""

    def reward(
        self,
        value: float,
        *,
        call: str | None = None,
        turn: int | None = None,
        leaf: int | None = None,
        policy: str | None = None,
    ) -> None:
        """Give a reward: to one answer by the `id` that the agent saw, to all answers of the n-th call (`turn`, from
        0), to one leaf of the policy's tree by its number, or, with none of these, to the whole session.

        An answer's reward is that of the sample which holds it. Several in one sample need `trainer.step_rewards`."""

    def metric(self, name: str, value: float) -> None:
        """Record a number for the episode; the mean over each batch is the step's metric episode/NAME."""
