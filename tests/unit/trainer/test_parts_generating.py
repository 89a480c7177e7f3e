"""A trainer with a generator samples while it waits for a part, and at no other time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rillflow.contracts import SystemClock
from rillflow.errors import CorruptData, LeaseLost
from rillflow.trainer.parallel.peers import Alone
from rillflow.trainer.parts import NoBatch, Parts, Stopped
from rillflow.types import Batch, BatchReply, BatchSample, Row

NOTHING = BatchReply(batch=None, phase="training", waiting_for="more")


def part(groups: int, *, rows: int = 1, complete: bool = False) -> BatchReply:
    sample = BatchSample(
        id="s", row=Row(unit="u", segment=0, offset=0, length=0), tokens=2, trained=1, reward=0.0, group="g",
        group_mean=0.0, group_std=0.0, group_size=1, staleness=0, truncated=False,
    )  # fmt: skip
    batch = Batch(
        id="b", attempt="a", policy="p", version=3, samples=[sample] * rows, seconds=60, groups=groups,
        complete=complete,
    )  # fmt: skip
    return BatchReply(batch=batch, phase="training")


class Generator:
    def __init__(self) -> None:
        self.on = False
        self.begun: list[tuple[dict[str, Any], int]] = []

    def begin(self, tensors: Any, version: int, probe: Any = None) -> None:
        assert not self.on
        self.on = True
        self.begun.append((dict(tensors), version))

    def end(self) -> None:
        self.on = False


class Stream:
    """Answers as told. Nothing is leased unless it is being sampled, nothing is read while it is."""

    def __init__(self, generator: Generator, *answers: BatchReply | Exception) -> None:
        self._generator = generator
        self._answers = iter(answers)

    def lease(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        assert self._generator.on
        reply = next(self._answers, NOTHING)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def read(self, one: Batch) -> Any:
        assert not self._generator.on
        return SimpleNamespace(samples=len(one.samples))


def parts_of(stream: Stream, generator: Generator, *, patience: float = 10.0, **more: Any) -> Parts:
    return Parts(
        stream, 3, patience=patience, stop=more.pop("stop", lambda: False), clock=SystemClock(), generator=generator,
        weights=lambda: {"w": 1}, **more,
    )  # type: ignore[arg-type]  # fmt: skip


def test_it_samples_with_the_weights_that_are_trained_until_the_batch_is_there() -> None:
    generator = Generator()
    parts = parts_of(Stream(generator, NOTHING, NOTHING, part(2, complete=True)), generator)
    assert parts.open()
    assert not generator.on
    assert [rows.samples for rows in parts] == [1]  # type: ignore[attr-defined]
    assert generator.begun == [({"w": 1}, 3)]


def test_between_two_parts_it_samples_again() -> None:
    generator = Generator()
    parts = parts_of(Stream(generator, part(1), NOTHING, part(2, complete=True)), generator)
    assert parts.open()
    assert len(list(parts)) == 2
    assert len(generator.begun) == 2
    assert not generator.on


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((LeaseLost("another trainer"), LeaseLost("another trainer")), LeaseLost),
        ((part(2), LeaseLost("gone")), LeaseLost),
        ((part(2),), NoBatch),
        ((part(2), BatchReply(batch=None, phase="ended")), Stopped),
    ],
)
def test_whatever_ends_the_wait_ends_the_sampling(answers: tuple[Any, ...], error: type[Exception]) -> None:
    generator = Generator()
    parts = parts_of(Stream(generator, *answers), generator, patience=0.01)
    with pytest.raises(error):
        all(part for opened in [parts.open()] if opened for part in parts)
    assert not generator.on


def test_an_attempt_that_is_given_up_samples_on_under_the_next() -> None:
    generator = Generator()
    parts = parts_of(Stream(generator, LeaseLost("released"), part(2, complete=True)), generator)
    assert parts.open()
    assert len(generator.begun) == 2


class OneOfTwo(Alone):
    """A rank whose peer has `others` rows."""

    size = 2

    def __init__(self, others: int) -> None:
        self._others = others

    def total(self, values: Sequence[float]) -> list[float]:
        return [value + self._others for value in values]


def test_a_rank_reads_every_part_whether_it_has_rows_in_it_or_not() -> None:
    generator = Generator()
    stream = Stream(generator, part(1, rows=0), part(2, rows=0, complete=True))
    parts = parts_of(stream, generator, peers=OneOfTwo(3))
    assert parts.open()
    assert [rows.samples for rows in parts] == [0, 0]  # type: ignore[attr-defined]


def test_a_batch_that_is_empty_for_all_ranks_is_refused() -> None:
    generator = Generator()
    parts = parts_of(Stream(generator, part(1, rows=0, complete=True)), generator, peers=OneOfTwo(0))
    assert parts.open()
    with pytest.raises(CorruptData, match="no samples"):
        list(parts)


def test_peers_lose_patience_together() -> None:
    class Impatient(OneOfTwo):
        def highest(self, values: Sequence[float]) -> list[float]:
            return [1.0]

    generator = Generator()
    with pytest.raises(NoBatch):
        parts_of(Stream(generator), generator, patience=1e6, peers=Impatient(0)).open()


class Told:
    """What the worker says of itself."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def begin(self, doing: str) -> None:
        self.heard.append(f"+{doing}")

    def end(self, doing: str) -> None:
        self.heard.append(f"-{doing}")

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        self.begin(what)
        yield
        self.end(what)


def test_a_worker_trains_but_for_its_waits() -> None:
    generator, told = Generator(), Told()
    parts = parts_of(Stream(generator, part(1), part(2, complete=True)), generator, spans=told)
    assert parts.open()
    waits = ["-train", "+switch", "-switch", "+switch", "-switch", "+train"]
    assert told.heard == waits
    assert len(list(parts)) == 2
    assert told.heard == 2 * waits


def test_a_wait_that_fails_leaves_the_worker_as_it_was() -> None:
    generator, told = Generator(), Told()
    parts = parts_of(Stream(generator), generator, patience=0.0, spans=told)
    with pytest.raises(NoBatch):
        parts.open()
    assert told.heard == ["-train", "+switch", "-switch", "+switch", "-switch", "+train"]
