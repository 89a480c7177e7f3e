"""Nodes whose weights lag behind the trainer's, in turns of a clock: their samples are trained, not dropped."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import pytest

from dataflow_world import prompts
from rillflow.errors import LeaseLost

STEP, GROUPS, LENGTH = 4, 8, 8.0  # turns of a trainer's step, groups of a batch, and the work of an answer


def play(world, lag, capacity, turns=300):
    """The share of turns in which the trainer has work, and of answers that are trained. Engines do `capacity` times
    the work that the trainer can take, all answers at once; they serve what was the head `lag` steps ago."""
    work = capacity * GROUPS * world.rules.group_size * LENGTH / STEP
    heads, playing = deque([0] * (lag * STEP + 1), lag * STEP + 1), []
    batch, trained, played, until = None, 0, 0, 0
    for turn in range(turns):
        world.clock.time += 0.01
        done = min(1.0, work / max(1, len(playing)))
        playing = [(left - done, lease, version) for left, lease, version in playing]
        for _, lease, version in [answer for answer in playing if answer[0] <= 0]:
            with suppress(LeaseLost):  # its group was dropped
                world.done(lease, version=version, reward=float(lease.task.place))
        playing = [answer for answer in playing if answer[0] > 0]
        if batch is not None and turn >= until:
            world.commit(batch)
            trained, batch = trained + 1, None
        if batch is None and (batch := world.ask().batch) is not None:
            until = turn + STEP
        heads.append(world.head)
        leases = world.lease(1000, version=heads[0])
        playing += [(LENGTH, lease, heads[0]) for lease in leases]
        played += len(leases)
    return trained * STEP / turns, trained * GROUPS * world.rules.group_size / (played - len(playing))


@pytest.mark.parametrize(("bound", "lag"), [(4, 2), (6, 3), (8, 3)])
def test_what_is_played_is_trained(make_world, bound, lag):
    world = make_world(staleness=bound, batch_groups=GROUPS, source=prompts(10_000), total_steps=10_000)
    busy, useful = play(world, lag, capacity=1.1)
    assert busy > 0.85
    assert useful > 0.9
    world.check()
