"""A node pulls from a store whose trainer publishes, prunes, goes back and is killed: it gets versions whole or not."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from killed_publisher import content

from commands import Warm
from forked_command import fork_python
from rillflow.errors import RillflowError
from rillflow.weights.pull import Puller
from rillflow.weights.transport.sources import FolderSource

SCRIPT = Path(__file__).with_name("killed_publisher.py")
LIVES = 4
SECONDS = 120.0  # for a number of pulls that takes a few


@pytest.mark.chaos
async def test_what_is_pulled_is_whole_whatever_happens_to_the_trainer(tmp_path: Path, warm: Warm) -> None:
    pullers = [Puller(FolderSource(tmp_path / "w"), mode) for mode in ("auto", "delta", "full")]  # type: ignore[arg-type]
    seen: list[Counter[str]] = [Counter() for _ in pullers]
    draw, end = random.Random(0), time.monotonic() + SECONDS
    for life in range(LIVES):
        words = [str(SCRIPT), str(tmp_path / "w"), str(life)]
        publisher = fork_python(warm.path(), words, os.environ, tmp_path / f"publisher-{life}.log")
        try:
            wanted = 8 * (life + 1)
            while min(counts["pulled"] for counts in seen) < wanted:
                assert time.monotonic() < end, f"the pulls do not get on: {seen}"
                assert publisher.poll() is None, "the publisher must not fail"
                await asyncio.gather(*(_pull(*pair) for pair in zip(pullers, seen, strict=True)))
                await asyncio.sleep(draw.random() * 0.05)
        finally:
            publisher.kill()
            publisher.wait(60)
    for puller, counts in zip(pullers, seen, strict=True):  # the writer has ended: the head can be pulled
        await _pull(puller, counts)
    assert [counts["delta"] > 0 for counts in seen] == [True, True, False]
    assert all(counts["full"] for counts in seen)


async def _pull(puller: Puller, counts: Counter[str]) -> None:
    if await puller.head() is None:
        return
    try:
        pulled = await puller.pull()
    except RillflowError:
        counts["missed"] += 1
        return
    counts["pulled"] += pulled.transfer.kind != "held"
    counts[pulled.transfer.kind] += 1
    expected = content(pulled.version)
    assert pulled.tensors.keys() == expected.keys()
    for name, tensor in pulled.tensors.items():
        assert torch.equal(tensor, expected[name]), (pulled.version, name)
