"""The hooks of a run at work.

Hooks are the user's code. Their decisions are carried out; their exceptions never lose a group. A group whose filter
raised ends as failed, with the error as its cause. A curator that raised is logged and passed over. An exception of the
sampler is the trainer's answer, because a batch needs a sampler. Each distinct error is logged once with its traceback,
and counted for the ledger.

In a service, users' hooks run beside the event loop (`Beside`), each call with a deadline; one that passes it counts as
one that raised. The ledger calls hooks in the middle of a transition. Where the answer of a user's hook is not known
yet, the call raises HookPending: the transition is rolled back, the hook runs in a thread, and the transition is tried
again with its answer. Meanwhile the loop serves everybody else. A hook works on one call at a time; a call is made once
for each transition that is carried out, however often it was tried; a hook that hangs past its deadline fails that
call, and every other one until it returns. A crash between a call and its transition may make the call twice.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from rillflow.config import DataflowConfig
from rillflow.config.tracebacks import UserErrors, located
from rillflow.contracts import Curator, Filter, Group, ReadyGroup, Replayer, Sampler
from rillflow.dataflow.hooks import CURATORS, FILTERS, SAMPLERS, build, short_name
from rillflow.dataflow.hooks.base import SavedStates
from rillflow.dataflow.hooks.filters import FunctionFilter
from rillflow.dataflow.hooks.samplers import EarliestDeadline, Replay
from rillflow.errors import RunError
from rillflow.types import Prompt
from rillflow.wire.blocking import in_daemon

# ---------------------------------------------------------------- beside the event loop

T = TypeVar("T")
Key = tuple[Any, ...]

_MOST_ANSWERS = 4096  # kept for transitions that were not tried again


class HookTimeout(Exception):
    """A hook has not returned in time."""


class HookPending(BaseException):
    """The answer of a user's hook is not known yet. Not an Exception, so that nothing but the service catches it."""

    def __init__(self, hook: object, name: str, key: Key, work: Callable[[], Any]) -> None:
        super().__init__(name)
        self.hook = hook
        self.name = name
        self.key = key
        self.work = work


@dataclass(frozen=True)
class _Outcome:
    """The result or the exception of a call."""

    value: Any = None
    error: Exception | None = None

    @classmethod
    def of(cls, work: Callable[[], Any]) -> _Outcome:
        try:
            return cls(work())
        except Exception as error:
            return cls(error=error)


class Beside:
    """The calls of one run's hooks. Belongs to one event loop; hooks that `is_users` run in threads, others at once."""

    def __init__(self, seconds: float, is_users: Callable[[object], bool]) -> None:
        self.wanted: dict[Key, HookPending] = {}  # calls that a transition went on without
        self._seconds = seconds
        self._is_users = is_users
        self._answers: dict[Key, _Outcome] = {}
        self._used: dict[Key, None] = {}  # by the transition that is being tried
        self._calls: dict[Key, asyncio.Task[None]] = {}
        self._turns: dict[int, asyncio.Lock] = {}
        self._stuck: set[int] = set()

    # ------------------------------------------------------------ inside a transition

    def answer(
        self, hook: object, name: str, key: Key, work: Callable[[], T], fits: Callable[[T], bool] = lambda value: True
    ) -> T:
        """Return or raise what the call has; HookPending where it was not made yet, or its answer no longer `fits`."""
        outcome = self._answers.get(key)
        if outcome is not None and outcome.error is None and not fits(outcome.value):
            outcome = None
        if outcome is None:
            if self._is_users(hook):
                raise HookPending(hook, name, key, work)
            outcome = _Outcome.of(work)
            self._keep(key, outcome)
        self._used[key] = None
        if outcome.error is not None:
            raise outcome.error
        return cast(T, outcome.value)

    def put_off(self, pending: HookPending) -> None:
        """The transition goes on without this answer. The answers that belong to it are kept for the next one."""
        self.wanted[pending.key] = pending
        for key in [key for key in self._used if key[:2] == pending.key[:2]]:
            del self._used[key]

    # ------------------------------------------------------------ around a transition

    def begin(self) -> None:
        """A transition is about to be tried."""
        self._used.clear()
        self.wanted.clear()

    def done(self) -> None:
        """The transition was carried out: its answers are used up."""
        for key in self._used:
            self._answers.pop(key, None)

    def refused(self) -> None:
        """The transition failed: errors of hooks are not kept for the next one, which asks again."""
        for key in self._used:
            if key in self._answers and self._answers[key].error is not None:
                del self._answers[key]

    def forget(self) -> None:
        """Forget the hooks' answers after their state was rolled back."""
        self._answers.clear()

    async def run(self, pending: HookPending) -> None:
        """Make the call, or wait for it if it is under way. A waiting caller may be cancelled; the call goes on."""
        task = self._calls.get(pending.key)
        if task is None:
            task = self._calls[pending.key] = asyncio.create_task(self._run(pending), name=f"hook-{pending.name}")
            task.add_done_callback(lambda _: self._calls.pop(pending.key, None))
        await asyncio.shield(task)

    async def _run(self, pending: HookPending) -> None:
        hook = id(pending.hook)
        async with self._turns.setdefault(hook, asyncio.Lock()):
            if hook in self._stuck:
                late = HookTimeout(f"{pending.name} has not returned from an earlier call")
                self._keep(pending.key, _Outcome(error=late))
            else:
                self._keep(pending.key, await self._called(pending, hook))

    async def _called(self, pending: HookPending, hook: int) -> _Outcome:
        thread = f"hook {pending.name}"
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                return _Outcome(
                    await in_daemon(pending.work, thread, exited=_exited, ended=lambda: self._stuck.discard(hook))
                )
        except Exception as error:
            if not deadline.expired():
                return _Outcome(error=error)
            self._stuck.add(hook)
            late = HookTimeout(f"{pending.name} took longer than {self._seconds:g} s")
            late.add_note(f"It is at:\n{_stack(thread)}")
            return _Outcome(error=late)

    def _keep(self, key: Key, outcome: _Outcome) -> None:
        self._answers[key] = outcome
        while len(self._answers) > _MOST_ANSWERS:
            del self._answers[next(iter(self._answers))]


def _exited(error: BaseException) -> Exception:
    return RunError(f"a hook raised {type(error).__name__}: {error}", "a hook must not end its thread")


def _stack(thread: str) -> str:
    """Return where the thread of this name is."""
    frames = sys._current_frames()
    found = [frames[one.ident] for one in threading.enumerate() if one.name == thread and one.ident in frames]
    return "".join(traceback.format_stack(found[0])) if found else "its end"


# ---------------------------------------------------------------- the hooks of a run

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
        """Run users' hooks beside the event loop from now on, each call for at most `seconds`; None if all
        hooks are ours."""
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
        """Return the changed rows (hook, key, JSON) to write over those saved before; they count as saved now. A
        hook that works in a thread reported its state at the end of its last call."""
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
