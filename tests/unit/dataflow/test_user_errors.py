"""The ledger counts errors of user code, keeps each traceback once, and tells of them in the status."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dataflow_world import World
from rillflow.contracts import Group
from rillflow.dataflow import report
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.ledger import nodes
from rillflow.types import FailTask, TaskLease, UserError

MakeWorld = Callable[..., World]
WRONG = UserError(kind="workflow_error", where="KeyError play.py:3 in play", error="KeyError: 'x'", trace="the trace")
AGAIN = msgspec.structs.replace(WRONG, trace="")


def fail(world: World, lease: TaskLease, *errors: UserError) -> None:
    news = FailTask(
        task=lease.task.id, attempt=lease.attempt, node="n0", cause="workflow_error", error="x", errors=list(errors)
    )
    for _ in range(2):  # a retried request is counted once
        assert world.ledger.fail(news).accepted


def test_each_is_counted_and_its_traceback_is_kept(make_world: MakeWorld) -> None:
    world = make_world(staleness=1)
    first, second, third = world.lease(3)
    fail(world, first, WRONG)
    fail(world, second, AGAIN)
    done = msgspec.structs.replace(world.news(third), errors=[msgspec.structs.replace(AGAIN, kind="tool x", count=5)])
    for _ in range(2):
        assert world.ledger.complete(done).accepted
    tool, workflow = report.status(world.ledger, []).errors
    assert (tool.kind, tool.count, tool.trace) == ("tool x", 5, "")
    assert workflow == msgspec.structs.replace(WRONG, count=2)
    world.ledger.commit()
    world.crash()
    assert [one.count for one in report.status(world.ledger, []).errors] == [5, 2]


def test_there_is_a_bound(make_world: MakeWorld, monkeypatch) -> None:
    monkeypatch.setattr(nodes, "_MOST_ERRORS", 2)
    world = make_world()
    world.ledger.note_errors([msgspec.structs.replace(WRONG, where=str(n), count=2) for n in range(2, 6)])
    found = {one.where: (one.kind, one.count) for one in report.status(world.ledger, []).errors}
    assert found == {"2": ("workflow_error", 2), "3": ("workflow_error", 2), "": ("others", 4)}


class Broken:
    """A curator and filter that raises."""

    def admit(self, prompt: object) -> bool:
        raise KeyError("qestion")

    def observe(self, group: Group) -> None: ...

    def on_version(self, version: int) -> None: ...

    def keep(self, group: Group) -> bool:
        return bool(1 / 0)


def test_hooks_are_among_them(make_world: MakeWorld) -> None:
    hook = Broken()
    world = make_world(hooks=Hooks(filters=[("mine", hook)], curators=[("mine", hook)]))
    for lease in world.lease(4):  # two groups
        world.done(lease)
    world.ledger.commit()
    found = {one.kind: one for one in report.status(world.ledger, []).errors}
    assert found["curator mine"].error.startswith("KeyError: 'qestion' (test_user_errors.py")
    assert "return bool(1 / 0)" in found["filter mine"].trace
    assert found["filter mine"].count == 2
