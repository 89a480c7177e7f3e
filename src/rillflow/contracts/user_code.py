"""The interfaces of what users write: tools, environments, workflows, prompt sources and hooks of the dataflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rillflow.types import FinishedEpisode, Observation, Prompt, Said, Scored

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class Tool(Protocol):
    """A function that a model may call. `parameters` is the JSON schema of its arguments."""

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
        """Return the text for the model. The arguments fit the schema; a ToolError is text for the model too."""


class Toolbox(Protocol):
    """The tools of a recipe. A call never raises for wrong arguments: it returns a text that begins with `error: `.

    Example:

        said = await agent.ask(messages, tools=episode.tools.schemas)
        for use in said.uses:
            text = await episode.tools.call(use.name, use.arguments, episode)
            messages.append({"role": "tool", "tool_call_id": use.id, "content": text})
    """

    @property
    def schemas(self) -> list[Any]:
        """The tools in OpenAI's format, for `tools=` of a call."""

    def names(self) -> Sequence[str]:
        """Return the names of all tools."""

    async def call(self, name: str, arguments: str | Mapping[str, Any], episode: Episode | None = None) -> str:
        """Call a tool and return its text; `arguments` is the model's JSON text, or the mapping parsed from it."""


class Environment(Protocol):
    """A world that one episode acts in. Its methods are called one at a time; `close` comes once, at any time.

    Example:

        class Echo:
            async def reset(self, payload, seed):
                return rillflow.Observation("Say hello.")

            async def step(self, action):
                return rillflow.Observation("Bye.", reward=float(action == "hello"), done=True)

            async def close(self):
                pass
    """

    async def reset(self, payload: Mapping[str, Any], seed: int) -> Observation:
        """Begin an episode. The same payload and seed give the same world."""

    async def step(self, action: str) -> Observation:
        """Take an action. An action that makes no sense is answered by an observation and does not raise."""

    async def close(self) -> None:
        """Free what the environment holds."""


class Role(Protocol):
    """A part in a workflow that a policy plays. Its calls carry the role's name, so recipes can compare like with like.

    Example:

        solver = episode.role("solver")
        said = await solver.ask([{"role": "user", "content": "What is 2 + 2?"}], max_tokens=16)
        print(said.text)
    """

    @property
    def name(self) -> str:
        """The role's name."""

    @property
    def policy(self) -> str:
        """The policy that plays the role."""

    @property
    def client(self) -> AsyncOpenAI:
        """An OpenAI client whose calls are the role's."""

    async def ask(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Said:
        """Return one answer. A JSON `schema` constrains its format; `settings` are those of the OpenAI client."""

    async def ask_many(
        self,
        messages: Sequence[dict[str, Any]],
        count: int,
        *,
        tools: Sequence[Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> list[Said]:
        """Return `count` independent answers to the same messages. Each has its own `call`, for its reward."""


@runtime_checkable
class Episode(Protocol):
    """The argument of a workflow: a prompt, clients for its policies, tools, an environment, a seed and a deadline.

    Any client that speaks OpenAI's or Anthropic's protocol can be used with `base_url` or `anthropic_url` and
    `api_key`.

    Example:

        async def play(episode: rillflow.Episode) -> str | None:
            response = await episode.client.chat.completions.create(
                model=episode.model, messages=[{"role": "user", "content": episode.payload["question"]}]
            )
            return response.choices[0].message.content
    """

    @property
    def prompt(self) -> Prompt:
        """The prompt: its id and its payload."""

    @property
    def payload(self) -> dict[str, Any]:
        """The prompt's payload, a row of the dataset."""

    @property
    def client(self) -> AsyncOpenAI:
        """An OpenAI client whose base URL is this episode's session at the gateway."""

    @property
    def model(self) -> str:
        """The name of the run's first policy, for `model=` of a call."""

    @property
    def policies(self) -> Sequence[str]:
        """The names of the run's policies."""

    @property
    def base_url(self) -> str:
        """The session's URL for OpenAI clients."""

    @property
    def anthropic_url(self) -> str:
        """The session's URL for Anthropic clients."""

    @property
    def api_key(self) -> str:
        """The session's key."""

    @property
    def seed(self) -> int:
        """A number that is fixed for the task, also when it is played again."""

    @property
    def options(self) -> Mapping[str, Any]:
        """The recipe's `options`, for the workflow."""

    @property
    def tools(self) -> Toolbox:
        """The recipe's `tools`; empty if it names none."""

    @property
    def environment(self) -> Environment:
        """This episode's own instance of the recipe's `environment`; it is closed when the episode ends."""

    @property
    def evaluating(self) -> bool:
        """True in an evaluation: nothing is trained on the episode, and nothing may be remembered."""

    def seconds_left(self) -> float:
        """Return the seconds until `rollout.episode_timeout`."""

    def role(self, name: str) -> Role:
        """Return a role of the workflow, played by the policy that the recipe's `roles` name for it."""

    def agent(self, name: str) -> AsyncOpenAI:
        """Return a `client` whose calls carry this agent's name, so that recipes can compare like with like."""

    def reward(
        self,
        value: float,
        *,
        call: str | None = None,
        turn: int | None = None,
        leaf: int | None = None,
        policy: str | None = None,
    ) -> None:
        """Give a reward to one answer by its `call` id, to all answers of the n-th call (`turn`, from 0), to one `leaf`
        of the policy's tree by its number, or, with none of these, to the whole session.

        An answer's reward belongs to the sample that holds the answer. Several in one sample need
        `trainer.step_rewards`."""

    def metric(self, name: str, value: float) -> None:
        """Keep a number with the episode; the step's metrics have its mean over the batch as `episode/NAME`."""


# ---------------------------------------------------------------- prompts, and hooks of the dataflow


class PromptSource(Protocol):
    """Yields prompts in an order fixed by its seed; `length` prompts make one epoch."""

    @property
    def length(self) -> int: ...

    def at(self, index: int) -> Prompt:
        """Return the prompt at a position of the endless sequence of epochs, from 0. The same position gives the same
        one."""


class PromptGenerator(Protocol):
    """A function that makes prompts: `prompts(split=…, count=…, seed=…)` yields `{"id", "payload"}` dicts."""

    def __call__(self, **arguments: Any) -> Iterator[dict[str, Any]]: ...


class Group(Protocol):
    """A complete group, as hooks see it: the episodes in which `policy` has trained tokens, in their places' order.

    `rewards`, `lengths` (trained tokens) and `truncated` have one value an episode. `staleness` is how many versions
    its oldest trained token is behind the policy now.
    """

    @property
    def id(self) -> str: ...

    @property
    def prompt(self) -> Prompt: ...

    @property
    def policy(self) -> str: ...

    @property
    def rewards(self) -> Sequence[float]: ...

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def truncated(self) -> Sequence[bool]: ...

    @property
    def staleness(self) -> int: ...

    @property
    def flat(self) -> bool:
        """Whether no sample differs in reward from those it is compared with (`dataflow.grouping`)."""

    @property
    def deviation(self) -> float:
        """The largest standard deviation (population) of rewards that are compared; infinite if none are."""


class Stateful(Protocol):
    """A hook that learns: its state is JSON and is checkpointed with the ledger, in the same transaction."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Curator(Stateful, Protocol):
    """Decides which prompts are played. It observes complete groups of the run's first policy, kept or not."""

    def admit(self, prompt: Prompt) -> bool: ...

    def observe(self, group: Group) -> None: ...

    def on_version(self, version: int) -> None: ...


class Filter(Protocol):
    """Decides whether a complete group is trained on; the reason of a drop is counted."""

    def keep(self, group: Group) -> bool | str:
        """Return True to keep the group, False or a reason to drop it."""


class ReadyGroup(Protocol):
    """A group that may be served to a policy's trainer.

    `order` is that of admission, `oldest` the version of its oldest trained token, `staleness` how many versions
    that is behind now, `spread` the standard deviation of its rewards, `served` how often it was trained before.
    """

    @property
    def id(self) -> str: ...

    @property
    def order(self) -> int: ...

    @property
    def oldest(self) -> int: ...

    @property
    def staleness(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def spread(self) -> float: ...

    @property
    def served(self) -> int: ...


class Sampler(Protocol):
    """Picks which ready groups a batch gets next."""

    def pick(self, ready: Sequence[ReadyGroup], want: int) -> list[str]:
        """Return exactly `want` different ids of `ready`, which has at least as many. They are served in order of
        admission."""


@runtime_checkable
class Replayer(Protocol):
    """A sampler that also serves trained groups again. The ledger keeps their rows readable."""

    @property
    def pool(self) -> int:
        """The number of the latest trained groups that are kept for it."""

    @property
    def staleness(self) -> int:
        """The most versions that a replayed group's oldest token may be behind."""

    def replay(self, pool: Sequence[ReadyGroup], groups: int) -> list[str]:
        """Return ids of `pool` that a new batch of `groups` groups gets before any fresh one; may be empty."""


class GroupReward(Protocol):
    """The parts of a recipe's reward that compare whole groups."""

    async def score(self, group: Sequence[FinishedEpisode]) -> Sequence[Scored]:
        """Return the reward of each episode of a complete group, in order; raise RewardError if it cannot be
        computed."""
