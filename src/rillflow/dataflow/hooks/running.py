"""The hooks of a run at work.

Hooks are the user's code. What they decide is taken; what they raise never loses a group. A group whose filter raised
ends as failed, with the error as its cause; a curator that raised is logged and passed over; without a sampler there
is no batch, so what it raised is the trainer's answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rillflow.config import DataflowConfig
from rillflow.contracts import Curator, Filter, Group, ReadyGroup, Replayer, Sampler
from rillflow.dataflow.hooks.build import build, short_name
from rillflow.dataflow.hooks.registry import CURATORS, FILTERS, SAMPLERS
from rillflow.dataflow.hooks.samplers.earliest_deadline import EarliestDeadline
from rillflow.dataflow.hooks.samplers.replay import Replay
from rillflow.dataflow.hooks.saving import SavedStates
from rillflow.errors import RunError
from rillflow.types import Prompt

log = logging.getLogger(__name__)

_LONGEST_CAUSE = 200


@dataclass
class Hooks:
    """The hooks of one run, in the recipe's order, each with its name."""

    sampler: Sampler = field(default_factory=EarliestDeadline)
    filters: Sequence[tuple[str, Filter]] = ()
    curators: Sequence[tuple[str, Curator]] = ()

    def __post_init__(self) -> None:
        samplers = [self.sampler, self.sampler.fresh] if isinstance(self.sampler, Replay) else [self.sampler]
        named = [(type(sampler).__name__, sampler) for sampler in samplers]
        self._states = SavedStates([*self.curators, *self.filters, *named])

    @classmethod
    def of(cls, config: DataflowConfig) -> Hooks:
        return cls(
            sampler=build("sampler", config.sampler, SAMPLERS),
            filters=[(short_name(hook.name), build("filter", hook, FILTERS)) for hook in config.filters],
            curators=[(short_name(hook.name), build("curator", hook, CURATORS)) for hook in config.curators],
        )

    # ------------------------------------------------------------ curators

    def admits(self, prompt: Prompt) -> bool:
        """Whether every curator admits it; those after the first that does not are not asked."""
        return all(self._admits(name, curator, prompt) for name, curator in self.curators)

    def _admits(self, name: str, curator: Curator, prompt: Prompt) -> bool:
        try:
            return curator.admit(prompt)
        except Exception:
            log.exception("curator %s could not judge prompt %s: it is admitted", name, prompt.id)
            return True

    def observe(self, group: Group) -> None:
        for name, curator in self.curators:
            try:
                curator.observe(group)
            except Exception:
                log.exception("curator %s could not observe group %s", name, group.id)

    def on_version(self, version: int) -> None:
        for name, curator in self.curators:
            try:
                curator.on_version(version)
            except Exception:
                log.exception("curator %s could not take version %d", name, version)

    # ------------------------------------------------------------ filters

    def verdict(self, group: Group) -> tuple[str, str]:
        """The state that a complete group moves to, and its cause: the first filter that drops it decides."""
        for name, judge in self.filters:
            try:
                kept = judge.keep(group)
            except Exception as error:
                log.exception("filter %s could not judge group %s", name, group.id)
                return "failed", f"filter {name} raised {type(error).__name__}"
            if isinstance(kept, str) or not kept:  # numpy's True is no `True`
                return "filtered", str(kept or name)[:_LONGEST_CAUSE]
        return "ready", ""

    # ------------------------------------------------------------ the sampler

    @property
    def replayer(self) -> Replayer | None:
        """The sampler, where it also serves groups again."""
        return self.sampler if isinstance(self.sampler, Replayer) else None

    def pick(self, ready: Sequence[ReadyGroup], want: int) -> list[str]:
        picked = self.sampler.pick(ready, want)
        if len(picked) != want or not _different_ids_of(ready, picked):
            raise RunError(
                f"the sampler picked {picked!r:.200} where {want} different ready groups were asked for",
                "fix Sampler.pick: it returns exactly `want` ids of `ready`",
            )
        return picked

    def replay(self, pool: Sequence[ReadyGroup], groups: int) -> list[str]:
        """What a new batch of `groups` groups gets again; nothing where the sampler does not replay."""
        if self.replayer is None:
            return []
        picked = self.replayer.replay(pool, groups)
        if len(picked) > groups or not _different_ids_of(pool, picked):
            raise RunError(
                f"the sampler replays {picked!r:.200} in a batch of {groups} groups",
                "fix Replayer.replay: it returns at most `groups` different ids of `pool`",
            )
        return picked

    # ------------------------------------------------------------ what they have learnt

    def changes(self) -> list[tuple[str, str, str]]:
        """Rows of (hook, key, JSON) to be written over those saved before; they count as saved from now on."""
        return self._states.changes()

    def restore(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """Make all state what the rows say: at a start, and when the transaction of the last changes is taken back."""
        self._states.restore(rows)


def _different_ids_of(groups: Sequence[ReadyGroup], picked: Sequence[str]) -> bool:
    return len(set(picked)) == len(picked) and set(picked) <= {group.id for group in groups}
