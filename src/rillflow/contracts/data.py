"""Prompt sources, and the hooks of a recipe's dataflow that choose prompts and groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from rillflow.types import FinishedEpisode, Prompt, Scored


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
