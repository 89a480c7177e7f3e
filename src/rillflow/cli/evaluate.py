"""`rillflow eval`, `rillflow leakage` and `rillflow label`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from rillflow.cli.app import RunArgument, app, clear_errors
from rillflow.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rillflow.agents.agentflow.labels import Labels, Played
    from rillflow.agents.agentflow.options import Endpoint
    from rillflow.config import Recipe


@app.command("eval", rich_help_panel="What agents use, and how good they are")
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="A run folder, a model folder, a .gguf file, or tiny", metavar="CHECKPOINT")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to every policy, such as engine.slots=32, or to the recipe, such as options.x=1"),
    ] = None,
    *,
    on: Annotated[
        str | None,
        typer.Option(help="Benchmarks, with commas between them; heldout: what the run holds out", metavar="NAMES"),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first questions of each", min=1)] = None,
    samples: Annotated[int, typer.Option(help="Answers to each question: the k of avg@k", min=1, max=4096)] = 4,
    temperature: Annotated[float, typer.Option(help="Where the workflow does not say", min=0, max=10)] = 0.6,
    max_tokens: Annotated[
        int | None, typer.Option(help="Of an answer", min=1, show_default="the benchmark's own")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers", min=0)] = 0,
    which: Annotated[
        str, typer.Option("--version", help="Of a run: latest, best (by held-out reward) or a number", metavar="V")
    ] = "latest",
    workflow: Annotated[
        str | None, typer.Option(help="module:function or file.py:function that answers", metavar="REF")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe or run whose workflow, roles, tools and options play", metavar="NAME")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="embedded, vllm, sglang, or the URL of a vLLM server", metavar="KIND")
    ] = "embedded",
    exact: Annotated[
        bool, typer.Option("--exact", help="Embedded engine: one sequence a pass, the same bits every time (slow)")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Where records and report go", show_default="a folder under evaluations/", file_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON")] = False,
) -> None:
    """Score a checkpoint on benchmarks: avg@k, pass@k and majority@k, with confidence intervals and a record of every
    answer. Stopped and started again it goes on where it was."""
    from rillflow.observe.run_view import quieten

    quieten()
    from rillflow.cli.evaluating import Asked, run_evaluation

    asked = Asked(
        checkpoint=checkpoint,
        overrides=tuple(overrides or ()),
        names=tuple(name.strip() for name in on.split(",") if name.strip()) if on else (),
        limit=limit,
        samples=samples,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        version=which,
        workflow=workflow,
        recipe=recipe,
        engine=engine,
        exact=exact,
        out=out,
    )
    with clear_errors():
        raise typer.Exit(run_evaluation(asked, as_json=as_json))


@app.command(rich_help_panel="What agents use, and how good they are")
def leakage(
    train: Annotated[str, typer.Argument(help="A benchmark's name, a JSONL or Parquet file, or a run folder")],
    test: Annotated[str | None, typer.Argument(help="The same", show_default="what the run holds out")] = None,
    *,
    words: Annotated[int, typer.Option(help="Words in a row that count as the same text", min=3)] = 13,
    field: Annotated[
        str | None, typer.Option(help="The key whose text is compared", show_default="the usual ones")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON")] = False,
) -> None:
    """Look for test questions among training prompts: word for word, and by runs of words. Exit code 1: some are."""
    from rillflow.cli.leakage import run_leakage

    with clear_errors():
        raise typer.Exit(run_leakage(train, test, words=words, field=field, as_json=as_json))


_HELDOUT_EVERY = 5
By = Literal["continuations", "returns", "judge", "both"]
console = Console(stderr=True)


@app.command(rich_help_panel="What agents use, and how good they are")
def label(
    folder: RunArgument,
    out: Annotated[Path, typer.Option(help="Where the rows go (JSON lines)", dir_okay=False)],
    *,
    heldout: Annotated[
        Path | None, typer.Option(help="Where those of every fifth prompt go instead", dir_okay=False)
    ] = None,
    by: Annotated[
        By,
        typer.Option(
            help="Continuations that the run played from each state, mean outcomes of its own episodes, "
            "a model that judges, or the mean of continuations and judge"
        ),
    ] = "continuations",
    url: Annotated[str | None, typer.Option(help="Of the judge's OpenAI-compatible server, up to and with /v1")] = None,
    model: Annotated[str | None, typer.Option(help="The judge's name there")] = None,
    key_variable: Annotated[str | None, typer.Option(help="Environment variable that holds its key")] = None,
    balance: Annotated[bool, typer.Option(help="Repeat rows to train on until good and bad ones are as many")] = True,
    results: Annotated[bool, typer.Option(help="Show the model the results of earlier decisions")] = True,
) -> None:
    """Label the decisions of a run's planner for a process reward model."""
    from rillflow.agents.agentflow.labels import balanced, collect, rows_of, split
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        judge = _judge(by, url, model, key_variable)
        run = RunFolder.open(folder)
        if by in ("continuations", "both"):
            _require_continuations(run.recipe)
        collected = collect(run.recipe, run.root)
        if not collected.episodes:
            raise DataError(
                f"no episode of {folder} can be read ({collected.gone} transcripts are gone)",
                "label a run soon after it, raise its dataflow.units.drop_after, or keep more (observe.trajectories)",
            )
        labels, missing = _labels(collected.episodes, by, judge)
        if not labels:
            raise DataError(f"no decision of {folder} has a label by {by}", "see whether the judge answers")
        train, apart = split(collected.episodes, _HELDOUT_EVERY) if heldout else (collected.episodes, [])
        rows = rows_of(train, labels, results=results)
        _write(out, balanced(rows) if balance else rows)
        held = rows_of(apart, labels, results=results)
        if heldout is not None:
            _write(heldout, held)
        console.print(
            f"{len(collected.episodes)} episodes, {len(rows)} labelled decisions to train on, {len(held)} held out, "
            f"{missing} without a label; transcripts gone: {collected.gone}, without a decision: {collected.empty}",
            highlight=False,
            soft_wrap=True,
        )


def _require_continuations(recipe: Recipe) -> None:
    """Refuse a run whose decisions have rewards of another kind, or none."""
    from rillflow.agents.agentflow.options import read_options

    options = read_options(recipe.options).process_reward
    if options is None or not options.continuations:
        raise ConfigError(
            "the run played no continuations, so its decisions cannot be labelled by them",
            "set options.process_reward.continuations in its recipe, or take --by returns",
        )


def _judge(by: By, url: str | None, model: str | None, key_variable: str | None) -> Endpoint | None:
    from rillflow.agents.agentflow.options import Endpoint

    if by in ("returns", "continuations"):
        return None
    if url is None or model is None:
        raise ConfigError("a judge needs --url and --model", "or take --by returns, which needs no judge")
    return Endpoint(url=url, model=model, key_variable=key_variable)


def _labels(episodes: Sequence[Played], by: By, judge: Endpoint | None) -> tuple[Labels, int]:
    """Return the labels, and how many decisions that a judge was asked about have none."""
    import asyncio

    from rillflow.agents.agentflow.labels import both, by_continuations, by_judge, by_returns

    if judge is None:
        return (by_returns if by == "returns" else by_continuations)(episodes), 0
    judged, missing = asyncio.run(by_judge(episodes, judge))
    return (both(by_continuations(episodes), judged) if by == "both" else judged), missing


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    from rillflow.storage import write_atomic

    write_atomic(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode())
