"""Users' hooks at work beside the event loop, each call with a deadline.

The ledger calls hooks in the middle of a transition. Where the answer of a user's hook is not known yet, the call
raises HookPending: the transition is rolled back, the hook runs in a thread, and the transition is tried again with its
answer. Meanwhile the loop serves everybody else.

Invariants: a hook works on one call at a time; a call is made once for each transition that is carried out, however
often it was tried; a hook that hangs past its deadline fails that call, and every other one until it returns. A crash
between a call and its transition may make the call twice.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rillflow.errors import RunError
from rillflow.wire.blocking import in_daemon

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
