"""How prompts and groups are chosen: sources, and the hooks of a recipe's dataflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from rillflow.types import FinishedEpisode, Prompt, Scored


class PromptSource(Protocol):
    """Yields prompts in an order fixed by its seed; `length` prompts make one epoch."""

    @property
    def length(self) -> int: ...

    def at(self, index: int) -> Prompt:
        """The prompt at a position of the endless sequence of epochs (0-based); pure, so a cursor is enough."""


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


class GroupReward(Protocol):
    """The parts of a recipe's reward that are of whole groups."""

    async def score(self, group: Sequence[FinishedEpisode]) -> Sequence[Scored]:
        """Return what each episode of a complete group is given, in their order; raise where there is no reward."""
