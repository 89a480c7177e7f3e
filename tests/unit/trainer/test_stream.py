"""A batch in parts: the trained samples, the requests, and the trainer's own engine meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_helpers import learner, random_samples, small_model

from rillflow.contracts import SystemClock
from rillflow.errors import CorruptData, LeaseLost
from rillflow.trainer.batches import Rows, make_rows
from rillflow.trainer.parallel import Alone, Stopped
from rillflow.trainer.stream import NoBatch, Parts
from rillflow.types import Batch, BatchReply, BatchSample, Row
from soak import repetitions

VAGUE = {"tokens_per_second", "parts", "mfu"}


Gradients = dict[str, torch.Tensor]


def trained(algorithm: str, parts: list[Rows], *, overlong: bool) -> tuple[Gradients, dict[str, float]]:
    """Clipping is out of reach, so that gradients are compared as they are. Metrics without the nodes' times."""
    model = small_model()
    one = learner(model, algorithm=algorithm, micro_tokens=40, max_grad_norm=1e9, overlong_filter=overlong)
    metrics = {name: value for name, value in one.step(parts).items() if not name.startswith("node_")}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}, metrics


@settings(max_examples=repetitions(8, 50), deadline=None)
@given(
    algorithm=st.sampled_from(["grpo", "dapo"]),
    seed=st.integers(0, 1000),
    cuts=st.lists(st.integers(1, 11), max_size=5, unique=True),
    overlong=st.booleans(),
    shuffled=st.booleans(),
)
def test_parts_give_the_gradients_of_the_whole(
    algorithm: str, seed: int, cuts: list[int], overlong: bool, shuffled: bool
) -> None:
    samples, payload = random_samples(seed, groups=3, size=4)
    samples = [msgspec.structs.replace(sample, replayed=n % 4 == 0) for n, sample in enumerate(samples)]
    whole, expected = trained(algorithm, [make_rows(samples, payload)], overlong=overlong)
    order = np.random.default_rng(seed).permutation(12) if shuffled else np.arange(12)
    pieces = np.split(order, sorted(cuts))
    parts = [make_rows([samples[i] for i in piece], [payload[i] for i in piece]) for piece in pieces]
    split, metrics = trained(algorithm, parts, overlong=overlong)
    for name, gradient in whole.items():  # the same fp32 terms, added up part by part
        torch.testing.assert_close(split[name], gradient, rtol=2e-4, atol=2e-6)
    for name in expected.keys() - VAGUE:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert (expected["parts"], metrics["parts"]) == (1, len(cuts) + 1)
    assert metrics["replayed_fraction"] == 0.25


# ---------------------------------------------------------------- asking for them


class Clock:
    """Moves only during a wait."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


class Service:
    """Gives scripted answers, each after a while; records its calls."""

    def __init__(self, clock: Clock, *answers: tuple[float, BatchReply | LeaseLost]) -> None:
        self._clock = clock
        self._answers = iter(answers)
        self.asked: list[tuple[str, int]] = []
        self.longest = 0.0

    def lease(self, version: int, attempt: str, wait: float, have: int) -> BatchReply:
        self.asked.append((attempt, have))
        self.longest = max(self.longest, wait)
        seconds, reply = next(self._answers, (wait, BatchReply(batch=None, phase="training", waiting_for="more")))
        self._clock.time += seconds
        if isinstance(reply, LeaseLost):
            raise reply
        return reply

    def read(self, part: Batch) -> Rows:
        self._clock.time += 100.0
        _, payload = random_samples(0)
        return make_rows(part.samples, payload[: len(part.samples)])


def part(groups: int, *, rows: int = 4, complete: bool = False, phase: str = "training") -> BatchReply:
    samples, _ = random_samples(0)
    batch = Batch(
        id="b", attempt="a", policy="p", version=3, samples=samples[:rows], seconds=60, groups=groups, complete=complete
    )
    return BatchReply(batch=batch, phase=phase)  # type: ignore[arg-type]


def opened(service: Service, clock: Clock, stops: Iterator[bool] = iter(())) -> Parts:
    parts = Parts(service, 3, patience=10.0, stop=lambda: next(stops, False), clock=clock)  # type: ignore[arg-type]
    assert parts.open()
    return parts


def test_every_part_is_asked_for_by_what_is_there_and_waits_are_kept_apart() -> None:
    clock = Clock()
    nothing = BatchReply(batch=None, phase="training")
    service = Service(
        clock, (1.0, nothing), (0.5, part(2)), (1.0, nothing), (1.0, part(2, rows=0)), (0.25, part(3)),
        (0.125, part(4, rows=1, complete=True)),
    )  # fmt: skip
    parts = opened(service, clock)
    assert [len(rows.length_R) for rows in parts] == [4, 4, 1]
    assert [have for _, have in service.asked] == [0, 0, 2, 2, 2, 3]
    assert len({attempt for attempt, _ in service.asked}) == 1
    assert (parts.opening, parts.waited) == (1.5, 2.375)
    assert parts.batch.complete
    assert service.longest == 1.0


def test_the_last_answer_may_bring_nothing_but_the_end() -> None:
    clock = Clock()
    parts = opened(Service(clock, (0.0, part(2)), (0.0, part(2, rows=0, complete=True))), clock)
    assert [len(rows.length_R) for rows in parts] == [4]


def test_a_batch_without_samples_is_refused() -> None:
    clock = Clock()
    with pytest.raises(CorruptData, match="no samples"):
        list(opened(Service(clock, (0.0, part(2, rows=0, complete=True))), clock))


def test_an_attempt_whose_batch_was_lost_unseen_is_given_up_for_a_new_one() -> None:
    """The first answer was lost; before the same attempt asked again, the ledger had released its batch."""
    clock = Clock()
    lost = BatchReply(batch=None, phase="training", waiting_for="the dataflow service to answer")
    service = Service(
        clock, (1.0, lost), (1.0, LeaseLost("batch b is released")), (0.5, part(2)), (0.0, part(3, complete=True))
    )
    parts = opened(service, clock)
    assert [len(rows.length_R) for rows in parts] == [4, 4]
    first, again, *rest = [attempt for attempt, _ in service.asked]
    assert first == again
    assert set(rest) == {rest[0]} != {first}
    assert parts.opening == 2.5


def test_a_trainer_that_may_ask_for_nothing_learns_it() -> None:
    clock = Clock()
    gone = [(0.0, LeaseLost("another trainer has joined"))] * 2
    with pytest.raises(LeaseLost, match="another trainer"):
        opened(Service(clock, *gone), clock)


def test_a_part_that_never_comes_is_named() -> None:
    clock = Clock()
    with pytest.raises(NoBatch, match="within 10 s, waiting for more"):
        list(opened(Service(clock, (0.0, part(2))), clock))


@pytest.mark.parametrize("phase", ["finishing", "ended"])
def test_a_run_that_ends_meanwhile_ends_the_step(phase: str) -> None:
    clock = Clock()
    service = Service(clock, (0.0, part(2)), (0.0, BatchReply(batch=None, phase=phase)))  # type: ignore[arg-type]
    with pytest.raises(Stopped):
        list(opened(service, clock))


def test_a_stop_between_parts_ends_the_step() -> None:
    clock = Clock()
    with pytest.raises(Stopped):
        list(opened(Service(clock, (0.0, part(2))), clock, iter([False, True])))


def test_no_batch_when_the_run_is_over() -> None:
    clock = Clock()
    service = Service(clock, (0.0, BatchReply(batch=None, phase="finishing")))
    assert not Parts(service, 3, patience=10.0, stop=lambda: False, clock=clock).open()  # type: ignore[arg-type]


NOTHING = BatchReply(batch=None, phase="training", waiting_for="more")


def small_part(groups: int, *, rows: int = 1, complete: bool = False) -> BatchReply:
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
    """Gives scripted answers. Nothing is leased outside of sampling, nothing is read during it."""

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
    parts = parts_of(Stream(generator, NOTHING, NOTHING, small_part(2, complete=True)), generator)
    assert parts.open()
    assert not generator.on
    assert [rows.samples for rows in parts] == [1]  # type: ignore[attr-defined]
    assert generator.begun == [({"w": 1}, 3)]


def test_between_two_parts_it_samples_again() -> None:
    generator = Generator()
    parts = parts_of(Stream(generator, small_part(1), NOTHING, small_part(2, complete=True)), generator)
    assert parts.open()
    assert len(list(parts)) == 2
    assert len(generator.begun) == 2
    assert not generator.on


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((LeaseLost("another trainer"), LeaseLost("another trainer")), LeaseLost),
        ((small_part(2), LeaseLost("gone")), LeaseLost),
        ((small_part(2),), NoBatch),
        ((small_part(2), BatchReply(batch=None, phase="ended")), Stopped),
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
    parts = parts_of(Stream(generator, LeaseLost("released"), small_part(2, complete=True)), generator)
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
    stream = Stream(generator, small_part(1, rows=0), small_part(2, rows=0, complete=True))
    parts = parts_of(stream, generator, peers=OneOfTwo(3))
    assert parts.open()
    assert [rows.samples for rows in parts] == [0, 0]  # type: ignore[attr-defined]


def test_a_batch_that_is_empty_for_all_ranks_is_refused() -> None:
    generator = Generator()
    parts = parts_of(Stream(generator, small_part(1, rows=0, complete=True)), generator, peers=OneOfTwo(0))
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
    """Return the worker's reported state."""

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
    parts = parts_of(Stream(generator, small_part(1), small_part(2, complete=True)), generator, spans=told)
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
