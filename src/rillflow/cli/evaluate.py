"""`rillflow eval` and `rillflow leakage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rillflow.cli.app import app, clear_errors


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
    from rillflow.cli.quiet import quieten

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
