"""Users' hooks run beside the event loop: a slow one delays only what needs it, one that hangs fails its call."""

from __future__ import annotations

import asyncio
import threading

import pytest
from dataflow_server import served

from dataflow_world import POLICY
from rillflow.dataflow.audit import audit
from rillflow.dataflow.hooks.running import Hooks
from rillflow.errors import RillflowError
from rillflow.types import Heartbeat

LONG = 60.0


class Held:
    """A hook of every kind. `calls` are counted; each waits until it is let `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began = threading.Event()
        self.calls: list[object] = []
        self.error: Exception | None = None

    def _called(self, what: object) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.calls.append(what)
        self.began.set()
        assert self.go.wait(LONG)
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def keep(self, group):
        self._called(group.id)
        return True

    def pick(self, ready, want):
        self._called(want)
        return [group.id for group in ready[:want]]

    def admit(self, prompt):
        self._called(prompt.id)
        return True

    def observe(self, group): ...

    def on_version(self, version): ...

    def state(self):
        return {"calls": len(self.calls)}

    def restore(self, state): ...


class Counted(Held):
    """Counts its calls, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.go.set()


class Ours(Counted):
    """Counts its calls in the loop's thread, as one of our own hooks."""

    __module__ = "rillflow.dataflow.hooks.curators.of_ours"

    def _called(self, what: object) -> None:
        self.calls.append(what)


async def soon(waiting):
    return await asyncio.wait_for(waiting, LONG)


async def until(condition):
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came")


async def played(run):
    """Complete all tasks but wait for nothing."""
    return [asyncio.create_task(run.done(lease)) for lease in (await run.lease()).leases]


async def test_other_routes_answer_while_a_filter_is_at_work(tmp_path):
    hook = Held()
    async with served(tmp_path, hooks=Hooks(filters=[("slow", hook)])) as run:
        await run.join()
        playing = await played(run)
        await until(hook.began.is_set)
        beat = Heartbeat(node="n1", incarnation="a", attempts=[], versions={POLICY: 0}, capacity=1)
        assert (await soon(run.client.heartbeat(beat))).phase == "training"
        assert (await soon(run.client.status())).phase == "training"
        assert (await soon(run.ask("a"))).batch is None
        assert (await soon(run.client.units())).units
        await run.housekeeping()
        assert not hook.go.is_set()
        hook.go.set()
        assert all(await soon(asyncio.gather(*playing)))
        assert (await run.ask("a")).batch.groups == 2
        assert sorted(hook.calls) == ["t000000", "t000001"], "each group is judged once"
    assert audit(tmp_path / "ledger.sqlite").balanced


async def test_a_filter_that_hangs_fails_its_groups_and_is_used_again_when_it_returns(tmp_path, caplog):
    hook = Held()
    async with served(tmp_path, hooks=Hooks(filters=[("slow", hook)]), hook_timeout=0.2) as run:
        await run.join()
        assert all(await soon(asyncio.gather(*await played(run))))
        counts = (await run.client.status()).counts
        assert counts["failed"] == 2
        assert hook.calls == ["t000000"], "the second was not asked: it was still at work"
        (first, *others) = [record for record in caplog.records if "filter slow" in record.message]
        assert "It is at:" in first.message
        assert "in keep" in first.message
        assert others
        assert not any("It is at:" in record.message for record in others)
        causes = [row["cause"] for row in run.ledger.db.all("SELECT cause FROM groups WHERE state = 'failed'")]
        assert causes == ["filter slow raised HookTimeout"] * 2
        hook.go.set()
        await until(lambda: not any(thread.name == "hook filter slow" for thread in threading.enumerate()))
        await asyncio.sleep(0)
        assert all(await soon(asyncio.gather(*await played(run))))
        assert (await run.ask("a")).batch.groups == 2


async def test_a_filter_that_raises_is_logged_with_its_traceback_once(tmp_path, caplog):
    hook = Counted()
    hook.error = KeyError("qestion")
    async with served(tmp_path, hooks=Hooks(filters=[("wrong", hook)])) as run:
        await run.join()
        assert all(await soon(asyncio.gather(*await played(run))))
        first, second = [record.message for record in caplog.records if "filter wrong" in record.message]
        assert "Traceback (most recent call last)" in first
        assert "in _called" in first
        assert second.endswith("(2 times so far; the traceback of the first is above)")
        (error,) = (await run.client.status()).errors
        assert (error.kind, error.count) == ("filter wrong", 2)
        assert "in _called" in error.trace


async def test_a_slow_curator_holds_up_admission_alone(tmp_path):
    hook, ours = Held(), Ours()
    curators = [("ours", ours), ("slow", hook)]
    async with served(tmp_path, hooks=Hooks(curators=curators)) as run:
        await until(hook.began.is_set)
        assert (await soon(run.lease())).leases == []
        assert (await soon(run.client.status())).counts.get("playing", 0) == 0
        hook.go.set()
        await until(lambda: run.ledger.tasks.pending == 4)
        assert len((await soon(run.lease())).leases) == 4
        assert hook.calls == ["p0", "p1"]
        assert ours.calls == ["p0", "p1"], "asked once for each prompt, too"


async def test_a_sampler_that_hangs_is_the_trainers_answer_and_nobody_elses(tmp_path):
    hook = Held()
    async with served(tmp_path, hooks=Hooks(sampler=hook), hook_timeout=0.2, staleness=1) as run:
        await run.join()
        await run.play_all()
        asking = asyncio.create_task(run.ask("a"))
        await until(hook.began.is_set)
        assert (await soon(run.client.status())).phase == "training"
        with pytest.raises(RillflowError, match="longer than"):
            await soon(asking)
        hook.go.set()
        await until(lambda: not any(thread.name == "hook the sampler" for thread in threading.enumerate()))
        await asyncio.sleep(0)
        assert (await soon(run.ask("a"))).batch.groups == 2


async def test_what_a_hook_has_learnt_is_saved_with_what_it_decided(tmp_path):
    hook = Counted()
    async with served(tmp_path, hooks=Hooks(filters=[("counts", hook)])) as run:
        await run.join()
        await run.play_all()
        await run.client.unit_beat(run.beat())
        assert run.ledger.db.value("SELECT value FROM hook_state WHERE hook = 'counts'") == '{"calls":2}'


class SlowToTell(Counted):
    """A filter whose state takes until it is let `tell`."""

    def __init__(self):
        super().__init__()
        self.asked, self.tell = threading.Event(), threading.Event()
        self.on_the_loop = False

    def state(self):
        if self.calls:
            on_the_loop = threading.current_thread() is threading.main_thread()
            self.on_the_loop |= on_the_loop
            self.asked.set()
            assert on_the_loop or self.tell.wait(LONG)
        return {"calls": len(self.calls)}


async def test_other_routes_answer_while_a_hook_tells_its_state(tmp_path):
    hook = SlowToTell()
    async with served(tmp_path, hooks=Hooks(filters=[("slow", hook)])) as run:
        await run.join()
        playing = await played(run)
        await until(hook.asked.is_set)
        assert (await soon(run.client.status())).phase == "training"
        hook.tell.set()
        assert all(await soon(asyncio.gather(*playing)))
        assert not hook.on_the_loop
        assert run.ledger.db.value("SELECT value FROM hook_state WHERE hook = 'slow'") == '{"calls":2}'
