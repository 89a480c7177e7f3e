"""Play every sample that has no record yet, several at once, and record each as it ends.

Invariants: the seed of a sample depends on the evaluation's seed, the benchmark, the question and the sample's number
alone, so neither the order nor a limit nor a stop in between changes an answer; at most `at_once` episodes are open; a
sample that fails is tried again before it counts as one without a reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest

from rillflow.agents.rewards.base import text_of
from rillflow.dataflow.rules import derive_seed
from rillflow.errors import RewardError, RunError
from rillflow.evaluate.records import KeptEpisodes, Record, RecordFile
from rillflow.evaluate.scores import vote
from rillflow.evaluate.stage import Ended, Stage
from rillflow.evaluate.suites import Suite
from rillflow.gateway.trees.record import SessionRecord
from rillflow.types import Prompt, Task

ATTEMPTS = 2
_FOR_GOOD = ("context_overflow",)  # it would fail again


@dataclass
class Tally:
    """How far a benchmark is."""

    name: str
    planned: int
    done: int = 0
    rewarded: int = 0
    reward: float = 0.0
    tokens: int = 0  # sampled by this run
    failures: dict[str, int] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        self.done += 1
        if record.reward is None:
            self.failures[record.cause] = self.failures.get(record.cause, 0) + 1
        else:
            self.rewarded += 1
            self.reward += record.reward


def wanted(suite: Suite, samples: int) -> Iterator[tuple[Prompt, int]]:
    """Every question's samples, one after the other: they share the question's prefix."""
    for index in range(suite.source.length):
        prompt = suite.source.at(index)
        for sample in range(samples):
            yield prompt, sample


async def play_suite(
    suite: Suite,
    stage: Stage,
    records: RecordFile,
    *,
    samples: int,
    seed: int,
    at_once: int,
    show: Callable[[Tally], None],
    kept: KeptEpisodes,
) -> list[Record]:
    """All records of the suite; its episodes are `kept` for people. RunError where nothing but failures comes."""
    tally = Tally(suite.name, suite.source.length * samples)
    known = records.of([(prompt.id, sample) for prompt, sample in wanted(suite, samples)])
    for record in known:
        if record.reward is not None:
            tally.add(record)
    show(tally)
    most = suite.recipe.dataflow.max_failures

    async def work(todo: Iterator[tuple[Prompt, int]]) -> None:
        for prompt, sample in todo:
            task, ended = await _play(suite, stage, prompt, sample, seed)
            await kept.keep(suite.name, task, ended)
            record = _record(suite, task, ended)
            records.add(record)
            tally.add(record)
            tally.tokens += record.tokens
            if not tally.rewarded and tally.done >= most:
                raise RunError(
                    f"the first {most} episodes of {suite.name} all failed; the last one: {record.cause}: "
                    f"{record.error}",
                    "mend that, then the same command goes on",
                )
            show(tally)

    missing = (one for one in wanted(suite, samples) if not records.rewarded(one[0].id, one[1]))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work(missing))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return records.of([(prompt.id, sample) for prompt, sample in wanted(suite, samples)])


async def _play(suite: Suite, stage: Stage, prompt: Prompt, sample: int, seed: int) -> tuple[Task, Ended]:
    own = derive_seed(seed, suite.name, prompt.id, sample)
    group = f"{suite.name}/{prompt.id}"
    task = Task(id=f"{group}/{sample}", prompt=prompt, group=group, place=sample, lane="eval", seed=own)
    ended = await stage.play(task)
    for _ in range(ATTEMPTS - 1):
        if not ended.cause or ended.cause in _FOR_GOOD:
            break
        ended = await stage.play(task)
    return task, ended


def _record(suite: Suite, task: Task, ended: Ended) -> Record:
    left = ended.record
    if ended.cause or left is None:
        return Record(task.prompt.id, task.place, task.seed, cause=ended.cause, error=ended.error)
    first = suite.recipe.policy
    sampled = {policy: left.samples(policy) for policy in suite.recipe.policies}
    answer = _answer(suite, ended, left)
    return Record(
        id=task.prompt.id,
        sample=task.place,
        seed=task.seed,
        reward=ended.rewards.get(first, next(iter(ended.rewards.values()))),
        answer=answer,
        vote=vote(suite.kind, answer),
        tokens=sum(one.trained for found in sampled.values() for one in found),
        cut=any(one.truncated for one in sampled[first]),
        calls=left.calls,
        seconds=round(ended.seconds, 3),
        digest=_digest(sampled),
        rewards=dict(ended.rewards) if len(ended.rewards) > 1 else {},
        metrics=dict(ended.metrics),
    )


def _digest(sampled: dict[str, list[Any]]) -> str:
    """Return all tokens, in the order of policies and paths."""
    tokens = [one.columns["tokens"] for found in sampled.values() for one in found]
    return xxh3_64_hexdigest(np.concatenate(tokens).tobytes()) if tokens else ""


def _answer(suite: Suite, ended: Ended, left: SessionRecord) -> str | None:
    """Return the workflow's answer; if it returned a reward, the last message of the first policy."""
    if suite.recipe.reward is not None:
        try:
            return text_of(ended.answer)
        except RewardError:
            return str(ended.answer)
    said = [path for path in left.transcript() if path["policy"] == suite.recipe.policy]
    content = said[-1]["messages"][-1].get("content") if said and said[-1]["messages"] else None
    return content if isinstance(content, str) else None
