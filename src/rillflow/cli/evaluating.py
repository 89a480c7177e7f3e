"""`rillflow eval`: builds the evaluation from the command line and shows its progress and results."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Column, Table
from xxhash import xxh3_64_hexdigest

from rillflow.cli.export import Checkpoint, open_checkpoint
from rillflow.config import Recipe, load_recipe, write_resolved
from rillflow.errors import ConfigError
from rillflow.evaluate.run import (
    GRADING,
    HELDOUT,
    REPORT,
    Evaluation,
    Result,
    Tally,
    average,
    evaluate,
    open_suites,
    report,
    with_context,
)
from rillflow.evaluate.scores import Score
from rillflow.observe.run_view import LiveLine
from rillflow.runtime.folder import RunFolder

console = Console(stderr=True)
UNSCORED, INTERRUPTED = 1, 130
_QUESTION = "rillflow.agents.workflows.question:play"
_AGENT = "agent"
_SLOTS = {"embedded": 16, "vllm": 256, "sglang": 256}
_TIMEOUT = 1800.0
_SERVER_MEMORY = 0.85  # of the GPU, which all policies' servers share
_KEPT = ("episode_timeout", "reward_timeout", "late_rewards")


@dataclass(frozen=True)
class Asked:
    """The command line."""

    checkpoint: str
    overrides: tuple[str, ...]
    names: tuple[str, ...]
    limit: int | None
    samples: int
    temperature: float
    max_tokens: int | None
    seed: int
    version: str
    workflow: str | None
    recipe: str | None
    engine: str
    exact: bool
    out: Path | None


def run_evaluation(asked: Asked, *, as_json: bool) -> int:
    """Play and report; the exit code: 0, 1 where a benchmark has no score, or 130 when interrupted."""
    checkpoint = open_checkpoint(asked.checkpoint, asked.version)
    evaluation = plan(asked, checkpoint)
    evaluation.claim()
    write_resolved(evaluation.recipe, evaluation.folder / "recipe.yaml")
    for line in (*checkpoint.why, f"records in {evaluation.folder}"):
        console.print(line, highlight=False, soft_wrap=True)
    try:
        with LiveLine(console) as live:
            results = asyncio.run(evaluate(evaluation, View(live).show))
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on where it was", highlight=False)
        return INTERRUPTED
    if as_json:
        print(json.dumps(report(evaluation, results), indent=2))
    else:
        Console().print(table(results, evaluation.samples))
        console.print(f"report: {evaluation.folder / REPORT}", highlight=False, soft_wrap=True)
    unscored = [name for name, result in results.items() if result.scores.average is None]
    for name in unscored:
        told = f"{name} has no score: every sample failed; see `error` in {evaluation.folder / 'records'}"
        console.print(told, style="red", highlight=False, soft_wrap=True)
    return UNSCORED if unscored else 0


# ---------------------------------------------------------------- what is played


def plan(asked: Asked, checkpoint: Checkpoint) -> Evaluation:
    recipe = _recipe(asked, checkpoint)
    names = asked.names or (HELDOUT,)
    suites = open_suites(recipe, names, limit=asked.limit, max_tokens=asked.max_tokens)
    fixed = any(change.startswith("engine.context=") for change in asked.overrides)
    if checkpoint.recipe is None and asked.recipe is None and not fixed:
        recipe = with_context(recipe, suites)
    settings = _settings(asked, checkpoint, recipe)
    digest = xxh3_64_hexdigest(json.dumps(settings, sort_keys=True).encode())[:8]
    folder = asked.out or Path("evaluations") / f"{checkpoint.label}-{digest}"
    return Evaluation(recipe, suites, settings, folder, asked.samples, asked.seed)


def _settings(asked: Asked, checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Any]:
    """Return the settings that answers depend on, without the choice of questions, samples and folders."""
    said = recipe.model_dump(mode="json", include={"workflow", "command", "reward", "roles", "tools", "environment"})
    engines = {
        name: policy.engine.model_dump(mode="json", exclude={"slots", "queue", "context", "server"})
        for name, policy in recipe.policies.items()
    }
    sampling = {name: policy.sampling.model_dump(mode="json") for name, policy in recipe.policies.items()}
    return {
        "checkpoint": checkpoint.identity,
        "seed": asked.seed,
        "temperature": asked.temperature,
        "max_tokens": asked.max_tokens,
        "exact": recipe.runtime.deterministic,
        "engines": engines,
        "sampling": sampling,
        "dialects": {name: [policy.tools, policy.reasoning] for name, policy in recipe.policies.items()},
        "options": recipe.options,
        **said,
    }


def _recipe(asked: Asked, checkpoint: Checkpoint) -> Recipe:
    """The recipe of the run, of --recipe, or of a plain question; with the checkpoint's models, and as asked."""
    base = checkpoint.recipe if asked.recipe is None else _named(asked.recipe)
    raw = base.model_dump(mode="json") if base is not None else _plain(asked)
    for name, policy in raw["policies"].items():
        policy["model"] = _model(checkpoint, name)
        policy.setdefault("sampling", {})["temperature"] = asked.temperature
        _choose_engine(policy, asked.engine, _SERVER_MEMORY / len(raw["policies"]))
    if asked.workflow is not None:
        reward = raw.get("reward") or GRADING
        raw |= {"command": None, "outside": False, "reward": reward, "rewards": "recipe"}
    raw["seed"] = asked.seed
    # Settings of training do not apply here, and may not fit one process.
    raw["runtime"] = {"deterministic": asked.exact, "threads": 0}
    raw["resources"], raw["rollout"] = {}, _rollout(raw.get("rollout", {}), raw["policies"])
    raw.setdefault("dataflow", {})["staleness"] = 0
    return _overridden(raw, asked)


def _named(name: str) -> Recipe:
    return RunFolder.open(name).recipe if (Path(name) / "recipe.yaml").is_file() else load_recipe(name)


def _plain(asked: Asked) -> dict[str, Any]:
    return {
        "name": "evaluation",
        "policies": {_AGENT: {}},
        "workflow": _QUESTION,
        "reward": GRADING,
        "data": {"prompts": {"benchmark": (asked.names or ("gsm8k",))[0]}},
        "rollout": {"episode_timeout": _TIMEOUT, "reward_timeout": 60.0},
    }


def _model(checkpoint: Checkpoint, policy: str) -> str:
    """A lone model plays every policy."""
    models = checkpoint.models
    if policy not in models and "" not in models:
        raise ConfigError(f"the run has no policy {policy!r}", f"it has {', '.join(models)}: give another --recipe")
    return models.get(policy) or models[""]


def _choose_engine(policy: dict[str, Any], wanted: str, memory: float) -> None:
    """The engine asked for, with what the policy's own settings say of its size; a server that they do not describe
    gets this share of the GPU's memory."""
    url = wanted if wanted.startswith(("http://", "https://")) else None
    kind = "vllm" if url else wanted
    if kind not in _SLOTS:
        raise ConfigError(f"unknown engine {wanted!r}", "give embedded, vllm, sglang or a URL")
    engine = policy.get("engine") or {}
    server = engine.get("server") if engine.get("kind", "embedded") == kind else None
    engine = {key: engine[key] for key in ("context", "device", "dtype", "slots", "queue") if key in engine}
    if kind == "embedded":
        policy["engine"] = {"slots": _SLOTS[kind], **engine, "kind": kind}
        return
    server = {"memory": memory, **(server or {}), "url": url} | ({"seeded": True} if kind == "vllm" else {})
    policy["engine"] = {"slots": _SLOTS[kind], "queue": 4096, "dtype": "bf16", **engine, "kind": kind, "server": server}


def _rollout(rollout: dict[str, Any], policies: dict[str, Any]) -> dict[str, Any]:
    """As many episodes at once as the engines have slots: none waits long for one within its time."""
    kept: dict[str, Any] = {key: value for key, value in rollout.items() if key in _KEPT}
    return {**kept, "episodes": min(policy["engine"]["slots"] for policy in policies.values())}


def _overridden(raw: dict[str, Any], asked: Asked) -> Recipe:
    """Validated, with the changes of the command line: those of a policy's keys go to every policy."""
    changes: list[str] = []
    for change in asked.overrides:
        changes += [f"policies.{name}.{change}" for name in raw["policies"]] if _of_policy(change) else [change]
    if asked.workflow is not None:
        changes.append(f"workflow={asked.workflow}")  # relative to where the user is, as all that is written there
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(raw, sort_keys=False))
        return load_recipe(str(path), changes)


def _of_policy(change: str) -> bool:
    """`tools` are a policy's when they are a word, how it writes its calls; a list of tools is the recipe's."""
    key, _, value = change.partition("=")
    return key.split(".")[0] in ("engine", "sampling") or key == "reasoning" or (key == "tools" and value.isalnum())


# ---------------------------------------------------------------- what is shown


class View:
    """The progress of an evaluation on the terminal."""

    def __init__(self, live: LiveLine) -> None:
        self._live = live
        self._begun: dict[str, float] = {}

    def show(self, tally: Tally) -> None:
        now = time.monotonic()
        seconds = now - self._begun.setdefault(tally.name, now)
        self._live.show(_line(tally, seconds), due=tally.done == tally.planned)


def _line(tally: Tally, seconds: float) -> str:
    mean = f"{tally.reward / tally.rewarded:.3f}" if tally.rewarded else "–"
    failed = "".join(f"  {cause} {count}" for cause, count in tally.failures.items())
    speed = tally.tokens / seconds if seconds > 0 else 0.0
    return f"{tally.name}  {tally.done}/{tally.planned}  mean {mean}  {speed:.0f} tokens/s  {seconds:.0f} s{failed}"


def table(results: Mapping[str, Result], samples: int) -> Table:
    """A row for each benchmark, and their average."""
    made = Table(Column("benchmark", no_wrap=True), "n", f"avg@{samples}", Column("95 %", no_wrap=True), "pass@k")
    for name in (f"maj@{samples}", "tokens", "cut", "no reward"):
        made.add_column(name)
    for name, result in results.items():
        scores = result.scores
        passed = list(scores.passed.items())[-1:]
        made.add_row(
            name,
            str(scores.questions),
            _value(scores.average),
            _interval(scores.average),
            *([f"{one.value:.3f} (k={k})" for k, one in passed] or ["–"]),
            _value(scores.majority),
            f"{scores.mean_tokens:.0f}",
            f"{scores.cut:.0%}",
            ", ".join(f"{cause} {count}" for cause, count in scores.no_reward.items()) or "0",
        )
    if len(results) > 1:
        mean = average(results)
        made.add_row("average", "", "–" if mean is None else f"{mean:.3f}")
    return made


def _interval(score: Score | None) -> str:
    """By bootstrap; Wilson's where all questions went the same way and there is nothing to draw from."""
    if score is None:
        return "–"
    drawn = score.bootstrap if score.bootstrap.low < score.bootstrap.high else score.wilson
    return f"{drawn.low:.3f}–{drawn.high:.3f}"


def _value(score: Score | None) -> str:
    return "–" if score is None else f"{score.value:.3f}"
