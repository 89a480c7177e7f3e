"""`rillflow try`: one episode of a recipe, printed as it is played."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from rillflow import types
from rillflow.config import Recipe, load_recipe
from rillflow.dataflow.rules import derive_seed
from rillflow.dataflow.sources import open_heldout, open_sources
from rillflow.errors import ConfigError
from rillflow.observe.trajectories import labelled, sampled_tokens, several, shortened, spoken
from rillflow.rollout.loading import check_players, refuse_outside
from rillflow.types import Prompt, Task

if TYPE_CHECKING:  # they load torch: the prompt is shown before
    from rillflow.evaluate.playing import Outcome, Turn
    from rillflow.gateway.trees.record import Sample

FAILED, INTERRUPTED = 1, 130
_NAME = "try"
_KEY_ENV = "OPENAI_API_KEY"
Lane = Literal["train", "evaluation"]


@dataclass(frozen=True)
class Asked:
    """The command line."""

    recipe: str
    overrides: tuple[str, ...]
    prompt: int
    seed: int | None
    lane: Lane
    version: str
    endpoint: str | None
    model: str | None
    tokens: bool


def run_trial(asked: Asked, *, as_json: bool) -> int:
    """Play and print; the exit code: 0, 1 where the episode failed, or 130 when interrupted."""
    console = Console(stderr=as_json)
    recipe = _recipe(asked, console)
    task = _task(recipe, asked)
    view = View(console, recipe, tokens=asked.tokens)
    view.begin(task, asked)
    try:
        with console.status("loading the model" if asked.endpoint is None else "asking the endpoint"):
            outcome = asyncio.run(_played(recipe, task, asked, view.turn))
    except KeyboardInterrupt:
        return INTERRUPTED
    view.end(outcome, endpoint=asked.endpoint is not None)
    if as_json:
        print(json.dumps(report(task, asked, outcome, recipe.seed), indent=2, default=str))
    return FAILED if outcome.ended.cause else 0


async def _played(recipe: Recipe, task: Task, asked: Asked, tell: Callable[[Turn], None]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="rillflow-try-") as folder:
        if asked.endpoint is None:
            from rillflow.evaluate.playing import try_policy

            return await try_policy(recipe, task, Path(folder), tell)
        from rillflow.evaluate.endpoint import Upstream, try_endpoint

        upstream = Upstream(asked.endpoint, str(asked.model), os.environ.get(_KEY_ENV, ""))
        return await try_endpoint(recipe, task, Path(folder), tell, upstream)


# ---------------------------------------------------------------- what is played


def _recipe(asked: Asked, console: Console) -> Recipe:
    """Return the recipe, or that of a run with the weights that it has trained."""
    if (asked.endpoint is None) != (asked.model is None):
        raise ConfigError("give --endpoint and --model together", "--endpoint http://127.0.0.1:8000/v1 --model NAME")
    run = Path(asked.recipe)
    if not run.is_dir():
        recipe = load_recipe(asked.recipe, asked.overrides)
    else:
        from rillflow.cli.export import open_checkpoint

        checkpoint = open_checkpoint(asked.recipe, asked.version)
        if checkpoint.recipe is None:
            raise ConfigError(f"{run} is not a run of a recipe", "give a recipe, or a folder that `rillflow run` made")
        recipe = load_recipe(str(run / "recipe.yaml"), asked.overrides)
        for line in checkpoint.why:
            console.print(line, highlight=False, soft_wrap=True)
        models = checkpoint.models
        trained = {name: policy.model_copy(update={"model": models[name]}) for name, policy in recipe.policies.items()}
        recipe = recipe.model_copy(update={"policies": trained})
    refuse_outside(recipe)
    check_players(recipe)
    return recipe if asked.seed is None else recipe.model_copy(update={"seed": asked.seed})


def _task(recipe: Recipe, asked: Asked) -> Task:
    prompt = _prompt(recipe, asked)
    lane: types.Lane = "train" if asked.lane == "train" else "eval"
    own = derive_seed(recipe.seed, _NAME, prompt.id)
    return Task(id=_NAME, prompt=prompt, group=_NAME, place=0, lane=lane, seed=own)


def _prompt(recipe: Recipe, asked: Asked) -> Prompt:
    if asked.lane == "train":
        source = open_sources(recipe.data.prompts, seed=recipe.seed, shuffle=False)
    else:
        found = open_heldout(recipe.data.heldout, seed=recipe.seed)
        if found is None:
            raise ConfigError("the recipe holds no prompts out", "leave --lane out, or give `data.heldout`")
        source = found
    if asked.prompt >= source.length:
        raise ConfigError(
            f"prompt {asked.prompt} does not exist: the recipe has {source.length}",
            f"give --prompt 0 to {source.length - 1}",
        )
    return source.at(asked.prompt)


# ---------------------------------------------------------------- what is shown


class View:
    """Prints an episode as it goes."""

    def __init__(self, console: Console, recipe: Recipe, *, tokens: bool) -> None:
        self._console = console
        self._recipe = recipe
        self._tokens = tokens
        self._named = len(recipe.policies) > 1
        self._turns = 0

    def begin(self, task: Task, asked: Asked) -> None:
        models = ", ".join(f"{name}: {policy.model}" for name, policy in self._recipe.policies.items())
        by = f"{asked.model} at {asked.endpoint}" if asked.endpoint else models
        head = f"prompt {asked.prompt} ({task.prompt.id}), {asked.lane}, seed {self._recipe.seed}; {by}"
        self._print(Text.assemble((self._recipe.name, "bold"), f"  {head}"))
        self._print(labelled("payload", shortened(task.prompt.payload), "dim"))

    def turn(self, turn: Turn) -> None:
        if turn.fork:
            self._print(Text(f"── a fork, one more sample: {turn.fork}", "magenta"))
        elif turn.begins and self._turns:
            self._print(Text("── another conversation", "magenta"))
        self._turns += 1
        for message in turn.given:
            self._print(spoken(message))
        who = turn.agent or (turn.policy if self._named else "assistant")
        self._print(spoken(turn.answer, who, _counted(turn)))
        if self._tokens and turn.tokens:
            decode = _decoder(self._recipe.policies[turn.policy].model)
            texts = [decode([token]) for token in turn.tokens]
            self._print(labelled("", sampled_tokens(texts, turn.logprobs)))

    def end(self, outcome: Outcome, *, endpoint: bool) -> None:
        ended = outcome.ended
        for error in ended.errors:
            self._print(Text(f"{error.kind}: {error.error}", "red"))
            self._print(Text(error.trace, "dim"))
        if ended.cause:
            self._print(Text.assemble((f"failed: {ended.cause}", "bold red"), f"  {ended.error}"))
            if ended.trace:
                self._print(Text(ended.trace))
        else:
            if ended.error:
                self._print(Text(ended.error, "yellow"))
            self._print(labelled("answer", shortened(ended.answer), "bold"))
            self._rewards(outcome)
        for line in _tokens(outcome, endpoint=endpoint):
            self._print(labelled("", Text(line, "dim")))

    def _rewards(self, outcome: Outcome) -> None:
        rewards = outcome.ended.rewards
        values = set(rewards.values())
        text = f"{next(iter(values)):g}" if len(values) == 1 else "  ".join(f"{n} {v:g}" for n, v in rewards.items())
        self._print(labelled("reward", Text(text, "bold"), "bold"))
        for name, value in outcome.ended.metrics.items():
            self._print(labelled("", f"{name} {value:g}"))

    def _print(self, text: Text) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


@lru_cache
def _decoder(model: str) -> Callable[[list[int]], str]:
    from rillflow.weights.models import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda tokens: str(tokenizer.decode(tokens))


def _counted(turn: Turn) -> str:
    """Return the remark on an answer's tokens."""
    if turn.sampled is None:
        return turn.finish
    cut = ", cut by its length" if turn.finish == "length" else ""
    return f"[{turn.sampled} tokens behind {turn.prompt}{cut}]"


def _tokens(outcome: Outcome, *, endpoint: bool) -> list[str]:
    parts = [several(outcome.calls, "call"), several(len(outcome.forks), "fork")]
    if outcome.ended.seconds:
        parts.append(f"{outcome.ended.seconds:.2f} s")
    if endpoint:
        return [", ".join(parts), "an endpoint's tokens are not known here: nothing to train on"]
    sizes = [f"{sample.tokens} tokens, {sample.trained} of them trained" for sample in outcome.samples]
    return [", ".join([*parts, several(len(sizes), "sample")]), *sizes]


def report(task: Task, asked: Asked, outcome: Outcome, seed: int) -> dict[str, Any]:
    """Return all of an episode as JSON."""
    ended = outcome.ended
    return {
        "recipe": asked.recipe,
        "lane": asked.lane,
        "prompt": {"index": asked.prompt, "id": task.prompt.id, "payload": task.prompt.payload},
        "seed": seed,
        "endpoint": asked.endpoint,
        "model": asked.model,
        "paths": list(outcome.paths),
        "answer": ended.answer,
        "rewards": dict(ended.rewards),
        "metrics": dict(ended.metrics),
        "calls": outcome.calls,
        "forks": list(outcome.forks),
        "samples": [_sample(sample) for sample in outcome.samples],
        "seconds": ended.seconds,
        "cause": ended.cause,
        "error": ended.error,
        "trace": ended.trace,
        "errors": [{"kind": one.kind, "error": one.error, "trace": one.trace} for one in ended.errors],
    }


def _sample(sample: Sample) -> dict[str, Any]:
    columns = {name: column.tolist() for name, column in sample.columns.items()}
    about = {"policy": sample.policy, "agent": sample.agent, "fork": sample.fork, "truncated": sample.truncated}
    return about | {"reward": sample.reward} | columns
