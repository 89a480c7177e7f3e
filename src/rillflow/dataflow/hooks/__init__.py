"""The data algorithms of a run: curators, filters and a sampler, by name or as `module:Class`.

Hooks are the user's code. What they decide is taken; what they raise never loses a group. A group whose filter raised
ends as failed, with the error as its cause; a curator that raised is logged and passed over; without a sampler there
is no batch, so what it raised is the trainer's answer.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rillflow.config import DataflowConfig, resolve_object
from rillflow.contracts import Curator, Filter, Group, ReadyGroup, Sampler
from rillflow.dataflow.hooks.filters.zero_variance import ZeroVariance
from rillflow.dataflow.hooks.samplers.earliest_deadline import EarliestDeadline
from rillflow.dataflow.hooks.samplers.fifo import Fifo
from rillflow.errors import ConfigError, RunError
from rillflow.types import Prompt

log = logging.getLogger(__name__)

FILTERS: dict[str, type[Filter]] = {"zero_variance": ZeroVariance}
SAMPLERS: dict[str, type[Sampler]] = {"earliest_deadline": EarliestDeadline, "fifo": Fifo}
CURATORS: dict[str, type[Curator]] = {}
_LONGEST_CAUSE = 200


def build(kind: str, name: str, known: Mapping[str, type[Any]]) -> Any:
    """An instance of a registered class, or of `module:Class`."""
    if name in known:
        return known[name]()
    if ":" in name:
        return resolve_object(name)()
    close = difflib.get_close_matches(name, known, 1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(f"there is no {kind} {name!r}", f"{guess}known: {', '.join(known) or 'none'}; or module:Class")


@dataclass
class Hooks:
    """The hooks of one run, each with the name that its state is saved under."""

    sampler: Sampler = field(default_factory=EarliestDeadline)
    filters: Sequence[tuple[str, Filter]] = ()
    curators: Sequence[tuple[str, Curator]] = ()

    @classmethod
    def of(cls, config: DataflowConfig) -> Hooks:
        return cls(
            sampler=build("sampler", config.sampler, SAMPLERS),
            filters=[(name, build("filter", name, FILTERS)) for name in config.filters],
            curators=[(name, build("curator", name, CURATORS)) for name in config.curators],
        )

    def admits(self, prompt: Prompt) -> bool:
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

    def verdict(self, group: Group) -> tuple[str, str]:
        """The state that a complete group moves to, and its cause."""
        for name, judge in self.filters:
            try:
                kept = judge.keep(group)
            except Exception as error:
                log.exception("filter %s could not judge group %s", name, group.id)
                return "failed", f"filter {name} raised {type(error).__name__}"
            if isinstance(kept, str) or not kept:  # numpy's True is no `True`
                return "filtered", str(kept or name)[:_LONGEST_CAUSE]
        return "ready", ""

    def pick(self, ready: Sequence[ReadyGroup], want: int) -> list[str]:
        picked = self.sampler.pick(ready, want)
        if len(set(picked)) != want or not set(picked) <= {group.id for group in ready}:
            raise RunError(
                f"the sampler picked {picked!r:.200} where {want} different ready groups were asked for",
                "fix Sampler.pick: it returns exactly `want` ids of `ready`",
            )
        return picked

    def states(self) -> dict[str, str]:
        """What is to be saved; a curator whose state is not JSON goes on with the one saved before."""
        found: dict[str, str] = {}
        for name, curator in self.curators:
            try:
                found[name] = json.dumps(curator.state())
            except Exception:
                log.exception("the state of curator %s could not be saved", name)
        return found

    def restore(self, states: Mapping[str, str]) -> None:
        for name, curator in self.curators:
            if name in states:
                curator.restore(json.loads(states[name]))
