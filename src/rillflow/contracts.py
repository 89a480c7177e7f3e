"""The protocols between the parts. A part is exchangeable when it keeps the promises written here.

Contracts name no implementation: `dataflow`, `rollout` and `trainer` meet only through these and `types`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from rillflow.types import Chunk, EngineStats, GenerateRequest, Observation, Prompt, Row, Said, UnitInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from openai import AsyncOpenAI

    Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
    Columns = Mapping[str, npt.NDArray[Any]]
    Tensors = Mapping[str, torch.Tensor]
    Tokens = npt.NDArray[np.int32]


class Change(NamedTuple):
    """New values of some weights of one tensor: `value_K` at the places `index_K` (int64, ascending, each once) of the
    flat tensor; with `index_K` None, of all of them, in order. The values have the tensor's dtype."""

    index_K: torch.Tensor | None
    value_K: torch.Tensor


class Patch(NamedTuple):
    """What turns the weights of version `base` into another version's: tensors that are not named stay as they are.
    `fingerprints` are what the named ones have afterwards (`weights.fingerprint`)."""

    base: int
    changes: Mapping[str, Change]
    fingerprints: Mapping[str, int]


class Clock(Protocol):
    """Time is injected, so that deadlines can be tested without waiting."""

    def now(self) -> float:
        """Seconds since the epoch, for what is written down."""

    def monotonic(self) -> float:
        """Seconds that never go back, for deadlines."""


class SystemClock:
    """The real clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class TokenSource(Protocol):
    """What a gateway asks for tokens: an engine, or a pool of them. Closing the iterator aborts the request."""

    @property
    def context(self) -> int: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]: ...


class Engine(Protocol):
    """Token ids in; chunks of ids, log-probs and version out.

    A token is sampled by exactly one version. `load` takes effect between two tokens and drops no request:
    running requests go on, their later chunks carrying the new version. `pause` returns once no token is being
    sampled; requests stay and go on after `resume`. Closing the iterator of `generate` aborts the request.
    """

    @property
    def version(self) -> int: ...

    @property
    def context(self) -> int:
        """Most tokens, prompt and answer together, that one sequence may have."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Raises ContextOverflow when the prompt leaves no room for one token, QueueFull at the bound."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load(self, tensors: Tensors, version: int) -> None:
        """Raises WeightsError, changing nothing, when names, shapes or dtypes do not fit."""

    async def patch(self, patch: Patch, version: int) -> None:
        """As `load`, of weights that differ from those it serves in a few places only. WeightsError, changing nothing,
        when it does not serve `patch.base`, or when the weights do not fit."""

    def stats(self) -> EngineStats: ...


class StorageUnit(Protocol):
    """Holds payload columns. A row is durable when `put` returns; a damaged one raises CorruptData.

    Rows lie in numbered segments, so that what is consumed can be dropped many rows at once.
    """

    def put(self, rows: Sequence[Mapping[str, Buffer]]) -> list[Row]: ...

    def get(self, rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, bytes]]:
        """The columns asked for, as far as a row has them."""

    def drop(self, segments: Sequence[int]) -> None:
        """Forget these segments; those that are gone already are passed over. Their numbers are never used again."""

    def closed(self, segments: Sequence[int]) -> list[int]:
        """Those of the segments that nobody will ever write into again, or that are gone."""

    def info(self) -> UnitInfo: ...

    def close(self) -> None: ...


class WeightStore(Protocol):
    """Immutable, hashed versions of one policy's weights, and a head that names the live one."""

    def publish(self, tensors: Tensors, version: int, parent: int | None) -> None:
        """All or nothing: readers see the version whole or not at all. A version is never written twice."""

    def head(self) -> int | None: ...

    def versions(self) -> list[int]: ...

    def pull(self, version: int) -> dict[str, torch.Tensor]:
        """Verified against the manifest; raises CorruptData rather than returning something else."""

    def rewind(self, version: int) -> list[int]:
        """Make `version` the head again and mark later versions orphaned; returns them."""


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
        """Whether there are several of everything that is compared (`dataflow.grouping`), and they got the same."""

    @property
    def deviation(self) -> float:
        """The largest standard deviation (population) of anything that is compared; infinite where nothing is."""


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
        """True to keep; False or the reason to drop."""


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
        """Exactly `want` different ids of `ready`, which has at least as many; served in order of admission."""


@runtime_checkable
class Replayer(Protocol):
    """A sampler that also serves groups again. The ledger keeps what it asks for readable."""

    @property
    def pool(self) -> int:
        """How many trained groups are kept for it, the latest."""

    @property
    def staleness(self) -> int:
        """How many versions a replayed group's oldest token may be behind."""

    def replay(self, pool: Sequence[ReadyGroup], groups: int) -> list[str]:
        """Ids of `pool` that a new batch of `groups` groups gets before any fresh one; may be empty."""


class Generator(Protocol):
    """The rollout of a process that also trains: it samples only between `begin` and `end`."""

    def begin(self, tensors: Tensors, version: int) -> None:
        """Take over these weights, which stay as they are until `end`, and sample with them."""

    def end(self) -> None:
        """Returns once no token is being sampled. Episodes that are under way wait for the next `begin`."""


class Executor(Protocol):
    """Starts and ends rollout nodes somewhere, for a maintainer. Nodes outlive who started them: a new executor of the
    same kind finds those of the one before it. Every call returns within its own deadline or raises RunError."""

    async def start(self, node: str) -> None:
        """Begin to start a node of this name; it joins the run by itself, or `nodes` tells that it has failed."""

    async def stop(self, node: str) -> None:
        """End a node that was drained, or that does not answer. One that has gone already is passed over."""

    async def nodes(self) -> dict[str, bool]:
        """The nodes that were started and not stopped, and whether each still runs."""

    async def close(self) -> None:
        """Let go of them: they run on."""


class PromptSource(Protocol):
    """Yields prompts in an order fixed by its seed; `length` prompts make one epoch."""

    @property
    def length(self) -> int: ...

    def at(self, index: int) -> Prompt:
        """The prompt at a position of the endless sequence of epochs (0-based); pure, so a cursor is enough."""


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
        """Several independent answers to the same messages. They share a `call`: a reward of it is that of each."""


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
        0), to one leaf of the policy's tree by its number, or, with none of these, to the whole session."""

    def metric(self, name: str, value: float) -> None:
        """Keep a number with the episode; the mean over each batch stands among the step's metrics, as episode/NAME."""


class PromptGenerator(Protocol):
    """A function that makes prompts: `prompts(split=…, count=…, seed=…)` yields `{"id", "payload"}` dicts."""

    def __call__(self, **arguments: Any) -> Iterator[dict[str, Any]]: ...
