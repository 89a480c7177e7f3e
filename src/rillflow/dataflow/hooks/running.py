"""The hooks of a run at work.

Hooks are the user's code. What they decide is taken; what they raise never loses a group. A group whose filter raised
ends as failed, with the error as its cause; a curator that raised is logged and passed over; without a sampler there
is no batch, so what it raised is the trainer's answer. In a service, users' hooks run beside the event loop (`beside`),
and one that passes its deadline counts as one that raised. Each distinct error is logged once with its traceback, and
counted for the ledger.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from rillflow.config import DataflowConfig
from rillflow.config.tracebacks import UserErrors, located
from rillflow.contracts import Curator, Filter, Group, ReadyGroup, Replayer, Sampler
from rillflow.dataflow.hooks.beside import Beside, HookPending, Key
from rillflow.dataflow.hooks.build import CURATORS, FILTERS, SAMPLERS, build, short_name
from rillflow.dataflow.hooks.filters import FunctionFilter
from rillflow.dataflow.hooks.samplers import EarliestDeadline, Replay
from rillflow.dataflow.hooks.saving import SavedStates
from rillflow.errors import RunError
from rillflow.types import Prompt

T = TypeVar("T")
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
        self._beside: Beside | None = None
        self._in_threads: frozenset[int] = frozenset()  # ids of hooks that work beside the event loop
        self.errors = UserErrors()
        self._told: deque[Exception] = deque(maxlen=64)  # errors that were logged lately

    def run_beside(self, seconds: float) -> Beside | None:
        """Run users' hooks beside the event loop from now on, each call for at most `seconds`; None if there are no
        such hooks."""
        hooks = [self.sampler, *(hook for _, hook in (*self.filters, *self.curators))]
        users = [hook for hook in hooks if _is_users(hook)]
        self._beside = Beside(seconds, _is_users) if users else None
        self._in_threads = frozenset(id(one) for hook in users for one in _with_inner(hook))
        return self._beside

    @classmethod
    def of(cls, config: DataflowConfig) -> Hooks:
        return cls(
            sampler=build("sampler", config.sampler, SAMPLERS),
            filters=[(short_name(hook.name), build("filter", hook, FILTERS)) for hook in config.filters],
            curators=[(short_name(hook.name), build("curator", hook, CURATORS)) for hook in config.curators],
        )

    # ------------------------------------------------------------ curators

    def admits(self, prompt: Prompt, position: int) -> bool | None:
        """Whether every curator admits the prompt at `position`; those after the first that does not are not asked.
        None where one of them has not answered yet: it is being asked."""
        try:
            return all(self._admits(n, prompt, position) for n in range(len(self.curators)))
        except HookPending as pending:
            assert self._beside is not None, "which alone raises it"
            self._beside.put_off(pending)
            return None

    def _admits(self, n: int, prompt: Prompt, position: int) -> bool:
        name, curator = self.curators[n]
        try:
            return self._ask(curator, f"curator {name}", ("admit", position, n), lambda: curator.admit(prompt))
        except Exception as error:
            self._complain(f"curator {name}", f"could not judge prompt {prompt.id}: it is admitted", error)
            return True

    def observe(self, group: Group) -> None:
        for n, (name, curator) in enumerate(self.curators):
            try:
                self._ask(curator, f"curator {name}", ("observe", *_seen(group), n), partial(curator.observe, group))
            except Exception as error:
                self._complain(f"curator {name}", f"could not observe group {group.id}", error)

    def on_version(self, version: int) -> None:
        for n, (name, curator) in enumerate(self.curators):
            try:
                self._ask(curator, f"curator {name}", ("version", version, n), partial(curator.on_version, version))
            except Exception as error:
                self._complain(f"curator {name}", f"could not take version {version}", error)

    # ------------------------------------------------------------ filters

    def verdict(self, group: Group) -> tuple[str, str]:
        """The state that a complete group moves to, and its cause: the first filter that drops it decides."""
        for n, (name, judge) in enumerate(self.filters):
            try:
                kept = self._ask(judge, f"filter {name}", ("keep", *_seen(group), n), partial(judge.keep, group))
            except Exception as error:
                self._complain(f"filter {name}", f"could not judge group {group.id}", error)
                return "failed", f"filter {name} raised {type(error).__name__}"
            if isinstance(kept, str) or not kept:  # numpy's True is not `True`
                return "filtered", str(kept or name)[:_LONGEST_CAUSE]
        return "ready", ""

    # ------------------------------------------------------------ the sampler

    @property
    def replayer(self) -> Replayer | None:
        """The sampler, where it also serves groups again."""
        return self.sampler if isinstance(self.sampler, Replayer) else None

    def pick(self, ready: Sequence[ReadyGroup], want: int) -> list[str]:
        """Return the ids of `want` of the ready groups, as the sampler picks them."""
        work = partial(self._pick, ready, want)
        return self._ask(self.sampler, "the sampler", ("pick", want), work, partial(_different_ids_of, ready))

    def _pick(self, ready: Sequence[ReadyGroup], want: int) -> list[str]:
        picked = self.sampler.pick(ready, want)
        if len(picked) != want or not _different_ids_of(ready, picked):
            raise RunError(
                f"the sampler picked {picked!r:.200} where {want} different ready groups were asked for",
                "fix Sampler.pick: it returns exactly `want` ids of `ready`",
            )
        return picked

    def replay(self, pool: Sequence[ReadyGroup], groups: int) -> list[str]:
        """Return the replayed groups of a new batch of `groups` groups; none if the sampler does not replay."""
        if self.replayer is None:
            return []
        work = partial(self._replay, self.replayer, pool, groups)
        return self._ask(self.sampler, "the sampler", ("replay", groups), work, partial(_different_ids_of, pool))

    def _replay(self, replayer: Replayer, pool: Sequence[ReadyGroup], groups: int) -> list[str]:
        picked = replayer.replay(pool, groups)
        if len(picked) > groups or not _different_ids_of(pool, picked):
            raise RunError(
                f"the sampler replays {picked!r:.200} in a batch of {groups} groups",
                "fix Replayer.replay: it returns at most `groups` different ids of `pool`",
            )
        return picked

    # ------------------------------------------------------------ what they have learnt

    def changes(self) -> list[tuple[str, str, str]]:
        """Rows of (hook, key, JSON) to be written over those saved before; they count as saved from now on. A hook that
        works in a thread has told its state at the end of its last call."""
        return self._states.changes(self._in_threads)

    def restore(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """Make all state what the rows say: at a start, and when the transaction of the last changes is taken back."""
        if self._beside is not None:
            self._beside.forget()
        self._states.restore(rows)

    # ------------------------------------------------------------ calls

    def _ask(
        self, hook: object, name: str, key: Key, work: Callable[[], T], fits: Callable[[T], bool] = lambda value: True
    ) -> T:
        """Return what the hook says; HookPending where it is asked beside the event loop and has not said it yet."""
        if self._beside is None:
            return work()
        return self._beside.answer(hook, name, key, partial(self._worked, hook, work), fits)

    def _worked(self, hook: object, work: Callable[[], T]) -> T:
        """Call a hook; read the state of a user's hook where it works."""
        try:
            return work()
        finally:
            if id(hook) in self._in_threads:
                for one in _with_inner(hook):
                    self._states.take(one)

    def _complain(self, name: str, what: str, error: Exception) -> None:
        """Log an error of a hook, and count it."""
        if any(error is told for told in self._told):
            return  # of a call whose transition is tried again
        self._told.append(error)
        log.error("%s %s: %s%s", name, what, located(error), self.errors.note(name, error))


def _is_users(hook: object) -> bool:
    """Return whether a hook is the user's; ours are quick."""
    if isinstance(hook, Replay):
        return _is_users(hook.fresh)
    return isinstance(hook, FunctionFilter) or not type(hook).__module__.startswith("rillflow.")


def _with_inner(hook: object) -> tuple[object, ...]:
    """Return a hook, and the sampler that it asks, if any."""
    return (hook, hook.fresh) if isinstance(hook, Replay) else (hook,)


def _seen(group: Group) -> tuple[str, str, tuple[float, ...], tuple[int, ...]]:
    """Return a key that changes if episodes of the group are played again."""
    return group.id, group.policy, tuple(group.rewards), tuple(group.lengths)


def _different_ids_of(groups: Sequence[ReadyGroup], picked: Sequence[str]) -> bool:
    return len(set(picked)) == len(picked) and set(picked) <= {group.id for group in groups}
