"""An evaluation from the engines' start to the report: one suite after the other, by the same engines.

A suite is a benchmark, or the held-out prompts of a run, with the recipe that plays it.

Its folder: recipe.yaml (what played), settings.json (what must be the same for records to be added to), one file of
records for each benchmark, report.json, logs/ of servers, trajectories.sqlite (what was said). Every sample that has no
record yet is played, several at once, and recorded as it ends.

Invariants: the seed of a sample depends on the evaluation's seed, the benchmark, the question and the sample's number
alone, so neither the order nor a limit nor a stop in between changes an answer; at most `at_once` episodes are open; a
sample that fails is tried again before it counts as one without a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest

from rillflow.agents.rewards.base import text_of
from rillflow.agents.rewards.registry import load_group_reward
from rillflow.config import PolicyConfig, Recipe, RewardConfig, SourceConfig
from rillflow.contracts import PromptSource
from rillflow.dataflow.rules import derive_seed
from rillflow.dataflow.sources import open_source, source_names
from rillflow.dataflow.sources.benchmarks import benchmark
from rillflow.errors import ConfigError, RewardError, RunError
from rillflow.evaluate.playing import Ended, Stage, open_engines, open_stage
from rillflow.evaluate.records import KeptEpisodes, Record, RecordFile, fingerprint
from rillflow.evaluate.scores import Kind, Scores, score, vote
from rillflow.gateway.trees.record import SessionRecord
from rillflow.gateway.trees.render import Renderer, load_renderer
from rillflow.storage import disk_errors, read_json, write_json
from rillflow.types import Prompt, Task
from rillflow.weights.model_folder import model_folder

HELDOUT = "heldout"
GRADING = "rillflow.evaluate.scores:reward"
_MARGIN = 128  # tokens that a chat template writes around a question
_SHORTEST = 256


@dataclass(frozen=True)
class Suite:
    """The questions of one benchmark, and the recipe by which they are played."""

    name: str
    source: PromptSource
    recipe: Recipe
    kind: Kind


def open_suites(recipe: Recipe, names: Sequence[str], *, limit: int | None, max_tokens: int | None) -> list[Suite]:
    """`names` are benchmarks, or `heldout` for what the recipe holds out, each source for itself. The answers to a
    benchmark are graded by its own reward, unless the workflow rewards itself: then that is the trajectory's. Without
    `max_tokens` an answer is as long as the benchmark says, or, of what is held out, as the recipe does."""
    suites: list[Suite] = []
    for name in names:
        if name == HELDOUT:
            suites += _heldout(recipe, limit, max_tokens)
        else:
            suites.append(_benchmark(recipe, name, limit, max_tokens))
    if len({suite.name for suite in suites}) < len(suites):
        raise ConfigError("a benchmark is named twice", "name each once in --on")
    return suites


def _heldout(recipe: Recipe, limit: int | None, max_tokens: int | None) -> list[Suite]:
    configs = recipe.data.heldout
    if not configs:
        raise ConfigError("the run holds no prompts out", "name benchmarks: --on gsm8k,math500")
    recipe = recipe if max_tokens is None else _answering(recipe, max_tokens)
    suites: list[Suite] = []
    for name, config in zip(source_names(configs), configs, strict=True):
        cut = config.model_copy(update={"limit": _least(config.limit, limit)})
        kind: Kind = "text" if config.benchmark is None else benchmark(config.benchmark).kind
        suites.append(Suite(name, open_source(cut, seed=recipe.seed, shuffle=False), recipe, kind))
    return suites


def _benchmark(recipe: Recipe, name: str, limit: int | None, max_tokens: int | None) -> Suite:
    found = benchmark(name)
    source = open_source(SourceConfig(benchmark=name, limit=limit), seed=recipe.seed, shuffle=False)
    recipe = _answering(recipe, max_tokens or found.max_tokens)
    if recipe.reward is not None:
        graded = [RewardConfig(name=found.reward, options=dict(found.options))]
        recipe = recipe.model_copy(update={"reward": graded})
    return Suite(name, source, recipe, found.kind)


def _answering(recipe: Recipe, longest: int) -> Recipe:
    """Return the recipe with this limit of tokens for each answer."""
    policies = {
        name: policy.model_copy(update={"sampling": policy.sampling.model_copy(update={"max_tokens": longest})})
        for name, policy in recipe.policies.items()
    }
    return recipe.model_copy(update={"policies": policies})


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def with_context(recipe: Recipe, suites: Sequence[Suite], most: int | None = None) -> Recipe:
    """The recipe with engines that have room for the longest question and its answer, and no more than the model or
    `most` allows."""
    policies = {
        name: policy.model_copy(
            update={"engine": policy.engine.model_copy(update={"context": _context(policy, name, suites, most)})}
        )
        for name, policy in recipe.policies.items()
    }
    return recipe.model_copy(update={"policies": policies})


def _context(policy: PolicyConfig, name: str, suites: Sequence[Suite], most: int | None) -> int:
    renderer = load_renderer(policy)
    needed = max(_longest(renderer, suite.source) + suite.recipe.policies[name].sampling.max_tokens for suite in suites)
    return min(max(needed + _MARGIN, _SHORTEST), most or _model_context(policy.model))


def _longest(renderer: Renderer, source: PromptSource) -> int:
    """Tokens of the longest question."""
    questions = (str(source.at(index).payload.get("question", "")) for index in range(source.length))
    return max((len(renderer.encode(text)) for text in questions), default=0)


def _model_context(model: str) -> int:
    from transformers import AutoConfig

    found = getattr(AutoConfig.from_pretrained(str(model_folder(model))), "max_position_embeddings", None)
    return int(found) if found else 1 << 20


# ---------------------------------------------------------------- one suite

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


# ---------------------------------------------------------------- a whole evaluation


SETTINGS, REPORT = "settings.json", "report.json"


@dataclass(frozen=True)
class Evaluation:
    """What to play. `settings` are whatever the answers depend on; `recipe` is that of the engines."""

    recipe: Recipe
    suites: Sequence[Suite]
    settings: Mapping[str, Any]
    folder: Path
    samples: int
    seed: int

    def records(self, suite: Suite) -> Path:
        return self.folder / "records" / f"{suite.name.replace(':', '-')}.jsonl"

    def claim(self) -> None:
        """Take the folder, before anything is played: records of other settings are never mixed with these."""
        with disk_errors(self.folder):
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        path, settings = self.folder / SETTINGS, dict(self.settings)
        if path.is_file():
            before = read_json(path)
            other = sorted(key for key in {*before, *settings} if before.get(key) != settings.get(key))
            if other:
                raise ConfigError(
                    f"{self.folder} has records of another evaluation: {', '.join(other)} differ",
                    "give another folder as --out",
                )
        write_json(path, settings, private=True)


@dataclass(frozen=True)
class Result:
    """The result of one benchmark. `tokens` and `seconds` count only the samples that this run has played."""

    scores: Scores
    fingerprint: str
    tokens: int
    seconds: float


async def evaluate(evaluation: Evaluation, show: Callable[[Tally], None]) -> dict[str, Result]:
    """Play what is missing and write the report, in a folder that was claimed."""
    if any(load_group_reward(suite.recipe.reward) is not None for suite in evaluation.suites):
        raise ConfigError(
            "the recipe's `reward` names `group`, and an evaluation plays and rewards episodes one by one",
            "give a recipe whose `reward` is of single episodes, or a benchmark, which has its own",
        )
    results: dict[str, Result] = {}
    kept = KeptEpisodes(evaluation.folder, evaluation.recipe)
    async with open_engines(evaluation.recipe, evaluation.folder / "logs") as engines:
        for suite in evaluation.suites:
            played = Tally(suite.name, 0)

            def seen(tally: Tally) -> None:
                nonlocal played
                played = tally
                show(tally)

            file, begun = RecordFile(evaluation.records(suite)), time.monotonic()
            try:
                async with open_stage(suite.recipe, engines, evaluation.folder) as stage:
                    found = await play_suite(
                        suite,
                        stage,
                        file,
                        samples=evaluation.samples,
                        seed=evaluation.seed,
                        at_once=suite.recipe.rollout.episodes,
                        show=seen,
                        kept=kept,
                    )
            finally:
                file.close()
                kept.close()
            results[suite.name] = _result(found, played.tokens, time.monotonic() - begun, evaluation.seed)
    write_json(evaluation.folder / REPORT, report(evaluation, results))
    return results


def _result(records: list[Record], tokens: int, seconds: float, seed: int) -> Result:
    return Result(score(records, seed=seed), fingerprint(records), tokens, round(seconds, 1))


def average(results: Mapping[str, Result]) -> float | None:
    """The mean of the benchmarks' avg@k, each counting the same; None where one has none."""
    found = [result.scores.average for result in results.values()]
    known = [one.value for one in found if one is not None]
    return fmean(known) if known and len(known) == len(found) else None


def report(evaluation: Evaluation, results: Mapping[str, Result]) -> dict[str, Any]:
    """All of it as JSON."""
    return {
        **evaluation.settings,
        "samples": evaluation.samples,
        "average": average(results),
        "benchmarks": {
            name: {
                **one.scores.plain(),
                "fingerprint": one.fingerprint,
                "played_tokens": one.tokens,
                "played_seconds": one.seconds,
            }
            for name, one in results.items()
        },
    }
