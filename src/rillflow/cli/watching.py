"""Commands that show episodes and runs."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from rillflow.cli.app import RunArgument, app, clear_errors

_TRY = "try"


@app.command(_TRY)
def try_one(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, the path of a YAML file, or a run folder")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, such as policies.agent.sampling.max_tokens=64")
    ] = None,
    *,
    prompt: Annotated[int, typer.Option(help="Which prompt, from 0", min=0, metavar="N")] = 0,
    lane: Annotated[
        Literal["train", "evaluation"], typer.Option(help="A prompt that is trained on, or one that is held out")
    ] = "train",
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same answers", min=0, show_default="the recipe's")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Instead of the policy: an OpenAI-compatible endpoint, such as https://host/v1; its key is taken from "
            "OPENAI_API_KEY",
            metavar="URL",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --endpoint: the model to ask for")] = None,
    which: Annotated[
        str, typer.Option("--version", help="Of a run: latest, best (by held-out reward) or a number", metavar="V")
    ] = "latest",
    tokens: Annotated[bool, typer.Option("--tokens", help="Print every sampled token with its log-prob")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole episode as JSON")] = False,
) -> None:
    """Play one episode without a run and print it: messages, tool calls, reward and its parts, tokens, forks.

    Exit code 1: the episode failed; the traceback says where. It starts sooner beside a `rillflow warm`.
    """
    from rillflow.cli.quiet import quieten
    from rillflow.runtime import warm

    own = sys.argv[1:2] == [_TRY]  # not of a program that calls this as a function
    if own and (code := warm.run_in_fork(sys.argv[1:], _not_warm)) is not None:
        raise typer.Exit(code)
    quieten()
    from rillflow.cli.trial import Asked, run_trial

    asked = Asked(recipe, tuple(overrides or ()), prompt, seed, lane, which, endpoint, model, tokens)
    with clear_errors():
        raise typer.Exit(run_trial(asked, as_json=as_json))


def _not_warm(why: str) -> None:
    typer.echo(f"starting without the warm process, which takes longer: {why}", err=True)


@app.command()
def status(
    folder: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON")] = False,
) -> None:
    """Show the state of a run: of a live one from its service, of another from its folder."""
    from rillflow.cli.status import print_status
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        print_status(RunFolder.open(folder), json_wanted=as_json)


@app.command()
def top(
    folder: Annotated[
        Path | None, typer.Argument(help="A run folder, or one with runs", metavar="[RUN]", show_default="runs")
    ] = None,
    *,
    every: Annotated[float, typer.Option(help="Seconds between two looks", min=0.2)] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports once, as JSON")] = False,
) -> None:
    """Watch runs: one line each, refreshed; or all of one. Ctrl-C ends it."""
    from rillflow.cli.status import top as watch

    with clear_errors(), suppress(KeyboardInterrupt):
        watch(folder, every=every, json_wanted=as_json)


@app.command()
def advise(
    folder: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advisories as JSON")] = False,
) -> None:
    """Say what is wrong with a run, with the numbers behind it, and what to do; of a healthy run, what to tune."""
    from rillflow.cli.advise import print_advice
    from rillflow.runtime.folder import RunFolder

    with clear_errors():
        print_advice(RunFolder.open(folder), as_json=as_json)
