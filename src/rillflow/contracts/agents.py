"""What a workflow gets: tools, an environment, roles, and the episode that has them all."""

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
        """What the model reads. Arguments have the schema's shape; a ToolError is for the model to read, too."""


class Toolbox(Protocol):
    """The tools of a recipe. A call never raises for what a model wrote: it reads what is wrong, from `error: ` on."""

    @property
    def schemas(self) -> list[Any]:
        """The tools in the OpenAI shape, for `tools=` of a call."""

    def names(self) -> Sequence[str]: ...

    async def call(self, name: str, arguments: str | Mapping[str, Any], episode: Episode | None = None) -> str:
        """`arguments` is the model's JSON text, or the mapping parsed from it."""


class Environment(Protocol):
    """A world that one episode acts in. Methods are called one at a time; `close` may come at any time, once."""

    async def reset(self, payload: Mapping[str, Any], seed: int) -> Observation:
        """Begin anew: the same payload and seed give the same world."""

    async def step(self, action: str) -> Observation:
        """What follows from an action. One that makes no sense is part of the world: it is told so, not raised."""

    async def close(self) -> None: ...


class Role(Protocol):
    """A part in a workflow, played by a policy; `client` says with every call whose it is."""

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
        """One answer. With a JSON `schema` it can only be of that shape; `settings` are those of the OpenAI client."""

    async def ask_many(
        self,
        messages: Sequence[dict[str, Any]],
        count: int,
        *,
        tools: Sequence[Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> list[Said]:
        """Several independent answers to the same messages. Each has a `call` of its own, for its reward."""


@runtime_checkable
class Episode(Protocol):
    """What a workflow gets: a prompt, clients for its policies, tools, an environment, a seed and a deadline.

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
        """The recipe's `options`: what the workflow makes of them is its own business."""

    @property
    def tools(self) -> Toolbox:
        """The recipe's `tools`; empty where it names none."""

    @property
    def environment(self) -> Environment:
        """This episode's own, of the recipe's `environment`; it is closed when the episode has ended."""

    @property
    def evaluating(self) -> bool:
        """Whether nothing of this episode is trained on: then nothing may be learned from it elsewhere, either."""

    def seconds_left(self) -> float: ...

    def role(self, name: str) -> Role:
        """A part in the workflow, played by the policy that the recipe's `roles` name for it."""

    def agent(self, name: str) -> AsyncOpenAI:
        """`client` for calls of one of several agents, which recipes may compare with their like alone."""

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
        """Keep a number with the episode; the mean over each batch stands among the step's metrics, as episode/NAME."""
