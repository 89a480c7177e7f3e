"""What goes wrong around the ledger of `ledger_machine`: replies get lost, clients go away while they are answered,
numbers are not finite, users' hooks hang, and nodes come and go by the hundred.

The ledger is driven as its service drives it, with users' hooks beside; only the threads are left out, so that every
example can be played again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from ledger_machine import NODES, WHO, LedgerMachine

from dataflow_world import World, sample
from ledger_moves import watch
from rillflow.contracts import Group
from rillflow.dataflow.hooks.running import Beside, HookPending, Hooks, HookTimeout, _Outcome
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.errors import BadRequest, LeaseLost, RillflowError
from rillflow.types import Ack, CompleteTask, JoinTrainer, LeaveRun, RetireNode, TaskLease

T = TypeVar("T")
MOST_GONE = 64  # nodes that are gone and kept apart from the sum
BAD = st.sampled_from([math.nan, math.inf, -math.inf])


class Moody:
    """A user's filter that hangs when the test says so."""

    def __init__(self) -> None:
        self.hangs = False

    def keep(self, group: Group) -> bool:
        return True


class BesideWithoutThreads(Beside):
    """Calls a hook at once. One that hangs has passed its deadline at once."""

    async def _called(self, pending: HookPending, hook: int) -> _Outcome:
        if not pending.hook.hangs:  # type: ignore[attr-defined]
            return _Outcome.of(pending.work)
        self._stuck.add(hook)
        return _Outcome(error=HookTimeout(f"{pending.name} took too long"))

    def returned(self, hook: object) -> None:
        """The hook returns from the call that it hung in."""
        self._stuck.discard(id(hook))


class ServedLedger(Ledger):
    """Tries a transition again once the hook that it needs has answered, as the service does."""

    _beside: Beside | None = None
    _deep = False

    def serve(self) -> BesideWithoutThreads:
        self._beside = made = BesideWithoutThreads(1.0, lambda hook: isinstance(hook, Moody))
        self._hooks._beside = made
        return made

    def _do(self, transition: Callable[[], T]) -> T:
        if self._beside is None or self._deep:
            return transition()
        while True:
            self._beside.begin()
            self._deep = True
            try:
                reply = transition()
            except HookPending as pending:
                asyncio.run(self._beside.run(pending))
                continue
            except Exception:
                self._beside.refused()
                raise
            finally:
                self._deep = False
            self._beside.done()
            return reply


def _served(name: str) -> Callable[..., Any]:
    plain = getattr(Ledger, name)
    return lambda self, *given: self._do(lambda: plain(self, *given))


for transition in (
    *(
        "lease_tasks",
        "renew",
        "retire",
        "leave",
        "complete_many",
        "fail",
        "expire",
        "advance",
        "unit_beat",
        "lose_rows",
    ),
    *("lease_batch", "renew_batch", "commit_batch", "lease_stage", "commit_stage", "join_trainer"),
):
    setattr(ServedLedger, transition, _served(transition))


class ServedWorld(World):
    beside: BesideWithoutThreads

    def open(self, resume: bool = False) -> Ledger:
        ledger = ServedLedger(
            self.path, self.rules, self.source, self.heldout, hooks=self.hooks, clock=self.clock, resume=resume
        )
        watch(ledger)
        self.beside = ledger.serve()
        ledger.advance()
        ledger.commit()
        return ledger


class FaultyMachine(LedgerMachine):
    def new_world(self, hooks: Hooks, **rules: Any) -> World:
        self.moody, self.come = Moody(), 0
        filters = [("moody", self.moody), *hooks.filters]
        return ServedWorld(self.folder, hooks=Hooks(sampler=hooks.sampler, filters=filters), **rules)

    def life(self, node: str) -> str:
        """One that has left, or was sent away, comes back as another process."""
        while self.world.ledger.nodes.retired(node, super().life(node)):
            self.lives[node] += 1
        return super().life(node)

    # ------------------------------------------------------------ lost replies

    def twice(self, call: Callable[[], T]) -> T:
        """Make the same call again, as a client does whose reply was lost: it has no effect of its own."""
        reply, error = _answer(call)
        before = self.state()
        again, same = _answer(call)
        assert (again, repr(same)) == (reply, repr(error))
        assert self.state() == before
        if error is not None:
            raise error
        return cast(T, reply)

    def state(self) -> list[tuple[Any, ...]]:
        """How many of each kind there are in each state, and what every node has done."""
        tables = ("groups", "tasks", "attempts", "shares", "batches", "stage_batches", "steps", "segments", "samples")
        where = {"samples": "live"}
        counts = [
            (table, *row)
            for table in tables
            for row in self.world.ledger.db.all(
                f"SELECT {where.get(table, 'state')}, count(*) FROM {table} GROUP BY 1 ORDER BY 1"
            )
        ]
        nodes = "SELECT name, held, leased, completed, failed, returned, produced, accepted FROM nodes ORDER BY name"
        return [*counts, *(tuple(row) for row in self.world.ledger.db.all(nodes))]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fail_twice(self, data: st.DataObject) -> None:
        node, lease, _ = data.draw(st.sampled_from(self.leases[-12:]))
        self.twice(lambda: self.world.fail(lease, node=node))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def lose_rows_twice(self, data: st.DataObject) -> None:
        _, samples = self.sent[data.draw(st.sampled_from(sorted(self.sent)[-8:]))]
        self.twice(lambda: self.world.lose(*(found.row for found in samples)))

    @rule(who=WHO)
    def ask_twice(self, who: int) -> None:
        """For a batch, under a new attempt; then it is the trainer's."""
        self.serve(who)
        batch = self.batches.get(self.name(who))
        if batch is not None and self.world.ledger.phase == "training":
            assert self.twice(lambda: self.world.ask(batch.attempt, policy=batch.policy).batch) == batch

    @rule(who=WHO)
    def join_twice(self, who: int) -> None:
        self.rejoin(who, 0, 0)
        name = self.name(who)
        head = self.world.ledger.lineage.head(name)
        ask = JoinTrainer(policy=name, incarnation=self.world.lives[name], checkpoint=head)
        self.twice(lambda: self.world.ledger.join_trainer(ask))

    @precondition(lambda self: self.world.rules.policies["main"].stages)
    @rule()
    def lease_stage_twice(self) -> None:
        self.lease_stage(2)
        if (batch := self.stage) is not None:
            assert self.twice(lambda: self.world.ask_stage("score", batch.attempt, 2)) == batch

    @rule(node=NODES)
    def leave_twice(self, node: str) -> None:
        news = LeaveRun(node=node, incarnation=self.life(node))
        self.twice(lambda: self.world.ledger.leave(news))

    @rule(node=NODES, drain=st.sampled_from([0.0, 5.0, 1e6]))
    def retire_twice(self, node: str, drain: float) -> None:
        try:
            self.twice(lambda: self.world.ledger.retire(RetireNode(node=node, drain=drain)))
        except BadRequest:
            assert node not in self.healthy()

    # ------------------------------------------------------------ clients that have gone

    @rule(node=NODES, want=st.integers(1, 4))
    def lease_to_a_client_that_has_gone(self, node: str, want: int) -> None:
        """The answer with these leases is lost: they expire, or the node reports which ones it holds."""
        self.world.lease(want, node=node, life=self.life(node))

    @rule(who=WHO)
    def serve_a_client_that_has_gone(self, who: int) -> None:
        """A batch whose answer was lost goes back when its trainer asks under another attempt."""
        name = self.name(who)
        if self.world.ledger.phase == "training":
            self.streams.pop(name, None)
            self.batches.pop(name, None)
            self.world.ask(policy=name)

    # ------------------------------------------------------------ numbers that are not finite

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), bad=BAD, where=st.sampled_from(["reward", "sample", "seconds", "metrics"]))
    def complete_with_a_number_that_is_not_finite(self, data: st.DataObject, bad: float, where: str) -> None:
        """It is refused, or a failure of its episode; what travels with it is taken as if it had come alone."""
        node, lease, versions = data.draw(st.sampled_from(self.leases[-12:]))
        wrong = _with(self.news(node, lease, versions), where, bad)
        beside = data.draw(st.sampled_from(self.leases[-12:]))
        good = self.news(*beside)
        if beside[1].attempt in (lease.attempt, *self.sent):
            self.world.ledger.complete_many([wrong])
        else:
            _, answer = self.world.ledger.complete_many([wrong, good])
            if isinstance(answer, Ack):
                self.note(beside[1], answer, good.reward, good.samples)
        if lease.attempt not in self.sent:
            self.spoiled |= {lease.attempt} if where == "reward" else set()
            found = self.world.ledger.db.value("SELECT state FROM attempts WHERE id = ?", (lease.attempt,))
            assert found != "done"

    def news(self, node: str, lease: TaskLease, versions: dict[str, int]) -> CompleteTask:
        samples = [sample(versions[name], policy=name, row=self.row(False)) for name in self.names]
        return self.world.news(lease, 1.0, samples=samples, node=node)

    # ------------------------------------------------------------ hooks that hang

    @rule()
    def hang(self) -> None:
        self.moody.hangs = True

    @rule()
    def go_on(self) -> None:
        """The hook returns from the call that it hung in."""
        self.moody.hangs = False
        self.world.beside.returned(self.moody)

    def all_is_well(self) -> None:
        """While the filter hangs every group fails, and further prompts are admitted."""
        self.go_on()

    # ------------------------------------------------------------ churn

    def healthy(self) -> set[str]:
        return {row["name"] for row in self.world.ledger.db.all("SELECT name FROM nodes WHERE state = 'healthy'")}

    @rule(number=st.sampled_from([1, 3, 100]), want=st.integers(0, 2))
    def come_and_vanish(self, number: int, want: int) -> None:
        """Nodes join, the last leases a task or two, and none sends a heartbeat in time."""
        for _ in range(number):
            self.come += 1
            self.world.beat((), f"c{self.come}", "x")
        heads = self.world.ledger.heads
        leases = self.world.lease(want, node=f"c{self.come}", life="x")
        self.leases += [(f"c{self.come}", lease, heads) for lease in leases]
        self.wait(11.0)
        gone = "SELECT count(*) FROM nodes WHERE state != 'healthy' AND held = 0"
        assert self.world.ledger.db.value(gone) <= MOST_GONE + 1

    @precondition(lambda self: self.come)
    @rule(data=st.data(), again=st.booleans())
    def come_back(self, data: st.DataObject, again: bool) -> None:
        """A node that was gone sends a heartbeat: the same process, or another under its name."""
        name = f"c{data.draw(st.integers(max(1, self.come - 110), self.come))}"
        self.world.beat((), name, "x" if again else "y")

    # ------------------------------------------------------------ what always holds

    def look_at_all(self) -> None:
        super().look_at_all()
        self.nodes_hold_what_is_leased()

    def nodes_hold_what_is_leased(self) -> None:
        db = self.world.ledger.db
        leased = db.value("SELECT count(*) FROM tasks WHERE state = 'leased'")
        assert db.value("SELECT ifnull(sum(held), 0) FROM nodes") == leased
        assert db.value("SELECT ifnull(sum(leased), 0) FROM nodes") == db.value("SELECT count(*) FROM attempts")


def _answer(call: Callable[[], T]) -> tuple[T | None, RillflowError | None]:
    try:
        return call(), None
    except (BadRequest, LeaseLost) as error:
        return None, error


def _with(news: CompleteTask, where: str, bad: float) -> CompleteTask:
    match where:
        case "sample":
            samples = [msgspec.structs.replace(news.samples[0], reward=bad), *news.samples[1:]]
            return msgspec.structs.replace(news, samples=samples)
        case "metrics":
            return msgspec.structs.replace(news, metrics={"score": bad})
        case _:
            return msgspec.structs.replace(news, **{where: bad})
